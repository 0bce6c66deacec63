"""Submitting planned arrays: all of them are queued, or none."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asyncpp_cli.base.atomic_files import write_record
from asyncpp_cli.launch.common import snapshot
from asyncpp_cli.launch.common.arrays import (
    ArrayManifest,
    ManifestRow,
    PlannedArray,
    site_settings_of,
)
from asyncpp_cli.launch.common.options import LaunchOptions
from asyncpp_cli.launch.submission import sbatch
from asyncpp_cli.launch.submission.end_message import submit_end_job
from asyncpp_cli.launch.submission.sbatch import BatchJob, profile_keys, small_job
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.processes import user_name
from asyncpp_cli.sites.profile import Site, site_option
from asyncpp_cli.slurm import client as slurm
from asyncpp_cli.slurm.client import SlurmError
from asyncpp_cli.slurm.submissions import (
    Submission,
    SubmittedArray,
    job_name,
    new_folder,
    write_submission,
)


def submit(
    experiment: Experiment,
    site: Site,
    planned: Sequence[PlannedArray],
    options: LaunchOptions,
    *,
    live: Sequence[str],
    then: Sequence[str] = (),
) -> Submission:
    """Submit the arrays and the job that follows them (`options.tell_end`).

    The submission is recorded before anything is queued, so that its jobs are known should this
    process be killed.

    Args:
        experiment: the experiment.
        site: site profile.
        planned: the arrays.
        options: options of the launch.
        live: SLURM's ids of the experiment's earlier arrays that have not ended; the jobs that follow wait
            for them as well.
        then: words of an asyncpp command to run in a small job when the arrays have ended.

    Raises:
        SlurmError: sbatch refuses an array; those before it are cancelled.
    """
    folder = new_folder(experiment)
    names = [job_name(experiment, folder, str(number)) for number in range(1, len(planned) + 1)]
    submission = Submission(
        folder=folder,
        path=str(folder.absolute()),
        site=site_option(site),
        cluster=slurm.cluster().name,
        user=user_name(),
        host=socket.gethostname(),
        time=time.time(),
        state="submitting",
        interpreter=snapshot.interpreter(),
        software=snapshot.software(),
        code=snapshot.copy_code(experiment.code).name,
        arrays=tuple(
            SubmittedArray(
                name=name,
                file=f"array-{number}.json",
                runs=tuple(planned_run.run.id for planned_run in array.runs),
                shape=str(array.shape),
                after="" if array.throttle.after is None else names[array.throttle.after],
            )
            for number, (name, array) in enumerate(zip(names, planned, strict=True), start=1)
        ),
        end=job_name(experiment, folder, "end") if options.tell_end and site.on_end else "",
        follow_up=job_name(experiment, folder, "tune") if then else "",
    )
    for array, planned_array in zip(submission.arrays, planned, strict=True):
        manifest = _manifest(array, planned_array, submission, site, options)
        write_record(folder / array.file, manifest)
    write_submission(submission)
    return _queue(site, submission, planned, live=live, then=then)


def _manifest(
    array: SubmittedArray,
    planned: PlannedArray,
    submission: Submission,
    site: Site,
    options: LaunchOptions,
) -> ArrayManifest:
    return ArrayManifest(
        name=array.name,
        submission=submission.name,
        cluster=submission.cluster,
        replay=options.replay,
        retries=site.retries if options.retries is None else options.retries,
        signal_lead=site.signal_lead,
        network_interface=site.network_interface,
        srun_flags=site.srun_flags,
        site_settings=site_settings_of(planned.shape, site),
        code=submission.code,
        software=submission.software,
        shape=planned.shape,
        command_prefix=site.command_prefix,
        python=site.python,
        rows=[
            ManifestRow(
                id=each.run.id,
                config_sha256=snapshot.file_hash(each.run.config_file),
                steps=each.steps,
                until=each.until,
            )
            for each in planned.runs
        ],
    )


def _queue(
    site: Site,
    submission: Submission,
    planned: Sequence[PlannedArray],
    *,
    live: Sequence[str],
    then: Sequence[str],
) -> Submission:
    """Queue the arrays and the jobs that follow them; the submission with SLURM's ids."""
    ids: dict[str, str] = {}
    folder = submission.folder.absolute()
    try:
        for array, planned_array in zip(submission.arrays, planned, strict=True):
            job = _batch_job(planned_array, name=array.name, code=submission.code, manifest=array.file)
            job = replace(job, after=[ids[array.after]] if array.after else ())
            ids[array.name] = _submit_array(site, folder, job)
        if submission.end:
            ids[submission.end] = submit_end_job(site, submission, after=[*live, *ids.values()])
        if submission.follow_up:
            job = small_job(
                submission.follow_up,
                [submission.interpreter, "-P", "-m", "asyncpp_cli", *then],
                after=[*live, *ids.values()],
                code=submission.code,
                output="tune-%j.out",
            )
            ids[submission.follow_up] = sbatch.submit(site, folder, job)
    except SlurmError as refusal:
        try:
            # By name: SLURM may have queued the job whose answer sbatch has not waited for.
            names = {*(array.name for array in submission.arrays), submission.end, submission.follow_up}
            slurm.cancel([job.id for job in slurm.queued_jobs(names - {""}).values()])
        except SlurmError as error:
            raise SlurmError(
                f"{refusal}; jobs of this launch may be queued all the same ({error}): see asyncpp status"
            ) from None
        write_submission(replace(submission, state="withdrawn"))
        raise
    submitted = replace(
        submission,
        state="submitted",
        arrays=tuple(replace(array, id=ids[array.name]) for array in submission.arrays),
    )
    write_submission(submitted)
    return submitted


def _batch_job(array: PlannedArray, *, name: str, code: str, manifest: str) -> BatchJob:
    return BatchJob(
        name=name,
        shape=array.shape,
        tasks=len(array.runs),
        at_once=array.throttle.at_once,
        command=sbatch.array_command(manifest),
        code=code,
        time=array.time,
    )


def _submit_array(site: Site, folder: Path, job: BatchJob) -> str:
    """Submit one array; SLURM's id for it.

    Raises:
        SlurmError: sbatch refuses; names the shape and the keys of the profile that may be the cause.
    """
    try:
        return sbatch.submit(site, folder, job)
    except SlurmError as error:
        count = "1 run" if job.tasks == 1 else f"{job.tasks} runs"
        raise SlurmError(
            f"{site.file}: {profile_keys(str(error))}: {error} (asked for {count} of {job.shape})"
        ) from None


def array_script(experiment: Experiment, site: Site, array: PlannedArray) -> str:
    """The script that an array would be submitted with."""
    name, code = job_name(experiment, Path("NAME"), "1"), snapshot.code_hash()
    job = _batch_job(array, name=name, code=code, manifest="array-1.json")
    return sbatch.script(site, experiment.submissions.absolute(), job)
