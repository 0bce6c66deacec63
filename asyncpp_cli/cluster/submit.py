"""From runs to submitted arrays: everything is checked before the first is queued, and all are, or none."""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from asyncpp_cli.cluster import arrays, slurm, snapshot
from asyncpp_cli.cluster.avoiding import excluded_at
from asyncpp_cli.cluster.lanes import Turn, turns
from asyncpp_cli.cluster.processes import user_name
from asyncpp_cli.cluster.queue import Standing
from asyncpp_cli.cluster.refusals import keys_of
from asyncpp_cli.cluster.shapes import Shape, settings_of, shape_of
from asyncpp_cli.cluster.sites import Site
from asyncpp_cli.cluster.slurm import SlurmError
from asyncpp_cli.cluster.submissions import Array, Submission, job_name, new_folder, write_submission
from asyncpp_cli.cluster.table import ArrayTable, Row, write_table
from asyncpp_cli.errors import DamagedError, UserError
from asyncpp_cli.run_data import config_to_train
from asyncpp_cli.runs import Experiment, Run, State
from stages.check import ConfigError, check
from stages.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a person says when they launch, beside the site."""

    replay: bool
    max_parallel: int | None
    retries: int | None
    report: bool


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run that will be a task of an array."""

    run: Run
    shape: Shape
    steps: int


@dataclass(frozen=True, kw_only=True)
class PlannedArray:
    """Runs of one shape that will be one array."""

    shape: Shape
    runs: tuple[PlannedRun, ...]
    turn: Turn


def missing(standings: Sequence[Standing], *, only: Collection[str] | None) -> list[Run]:
    """The runs that are neither completed, nor going on, nor in the queue."""
    return [
        standing.run
        for standing in standings
        if (only is None or standing.run.id in only)
        and standing.status.state not in (State.COMPLETED, State.RUNNING)
        and not standing.has_job
    ]


def plan(
    runs: Sequence[Run], site: Site, choices: Choices, *, max_array_size: int, room: int | None = None
) -> list[PlannedArray]:
    """The arrays to submit, with each run's configuration checked.

    Args:
        runs: to be submitted.
        site: where.
        choices: what else was said.
        max_array_size: SLURM's bound on the tasks of an array; the site's own may be smaller.
        room: jobs that may be submitted; runs beyond it are left out. None: all.

    Raises:
        UserError: a run cannot be read, trained, or placed at this site.
    """
    planned = []
    seen: dict[tuple[Any, ...], Any] = {}
    for run in runs:
        config = _checked(run, site, seen)
        shape = shape_of(config, site, replay=choices.replay)
        planned.append(PlannedRun(run=run, shape=shape, steps=config.train.steps))
    largest = min(site.array_limit or max_array_size, max_array_size)
    groups = []
    for shape, of_shape in groupby(sorted(planned, key=_shape)[:room], key=_shape):
        group = tuple(of_shape)
        groups += [(shape, group[first : first + largest]) for first in range(0, len(group), largest)]
    at_once = choices.max_parallel or site.max_parallel
    all_turns = turns([len(group) for _, group in groups], at_once=at_once)
    return [
        PlannedArray(shape=shape, runs=group, turn=turn)
        for (shape, group), turn in zip(groups, all_turns, strict=True)
    ]


def _shape(planned: PlannedRun) -> Shape:
    return planned.shape


def _checked(run: Run, site: Site, seen: dict[tuple[Any, ...], Any]) -> RunConfig:
    try:
        config = config_to_train(run)
        config.site = replace(config.site, **site.run)
        check(config, seen=seen)
    except DamagedError as error:
        raise UserError(str(error)) from error
    except ConfigError as error:
        raise UserError(f"{run.config_file}: {error.key}: {error.message}") from error
    if site.signal_lead < config.site.grace + 10:
        raise UserError(
            f"{site.file}: signal_lead: {site.signal_lead} s are too few for a run that may take "
            f"{config.site.grace:g} s to save; accepted: {config.site.grace + 10:g} or more, or run.grace"
        )
    return config


def room(site: Site) -> int | None:
    """How many more jobs the site lets this user have; None where it has no limit.

    Raises:
        SlurmError: SLURM does not answer.
    """
    return None if site.submit_limit is None else max(0, site.submit_limit - slurm.jobs_of_user())


def submit(
    experiment: Experiment,
    site: Site,
    planned: Sequence[PlannedArray],
    choices: Choices,
    *,
    live: Sequence[str],
) -> Submission:
    """Submit the arrays, and if asked for the report that follows them.

    What is to be submitted is written first, so that it is known should this process be killed.

    Args:
        experiment: whose runs.
        site: where.
        planned: the arrays.
        choices: what else was said.
        live: SLURM's numbers of the experiment's earlier arrays that have not ended: the report follows them
            too.

    Raises:
        SlurmError: sbatch refuses one; those before it are withdrawn then.
    """
    folder = new_folder(experiment)

    def name_of(number: int) -> str:
        return job_name(experiment, folder, str(number + 1))

    code = snapshot.copy_code(experiment.code).name
    software = snapshot.software()
    submission = Submission(
        folder=folder,
        site=site.name,
        cluster=slurm.cluster().name,
        user=user_name(),
        host=socket.gethostname(),
        time=time.time(),
        state="submitting",
        interpreter=snapshot.interpreter(),
        software=software,
        code=code,
        arrays=tuple(
            Array(
                name=name_of(number),
                file=f"array-{number + 1}.json",
                runs=tuple(planned_run.run.id for planned_run in array.runs),
                shape=str(array.shape),
                after="" if array.turn.after is None else name_of(array.turn.after),
            )
            for number, array in enumerate(planned)
        ),
        report=job_name(experiment, folder, "report") if choices.report else "",
    )
    for array, wanted in zip(submission.arrays, planned, strict=True):
        table = ArrayTable(
            name=array.name,
            submission=submission.name,
            cluster=submission.cluster,
            replay=choices.replay,
            retries=site.retries if choices.retries is None else choices.retries,
            signal_lead=site.signal_lead,
            network_interface=site.network_interface,
            srun_flags=site.srun_flags,
            site_settings=settings_of(wanted.shape, site),
            code=code,
            software=software,
            shape=wanted.shape,
            exclude=site.exclude or "",
            rows=[_row(planned_run) for planned_run in wanted.runs],
        )
        write_table(folder / array.file, table)
    write_submission(submission)
    return _queue(experiment, site, submission, planned, live=live)


def _row(planned: PlannedRun) -> Row:
    config_sha256 = snapshot.file_hash(planned.run.config_file)
    return Row(id=planned.run.id, config_sha256=config_sha256, steps=planned.steps)


def _queue(
    experiment: Experiment,
    site: Site,
    submission: Submission,
    planned: Sequence[PlannedArray],
    *,
    live: Sequence[str],
) -> Submission:
    ids: dict[str, str] = {}
    folder = submission.folder.absolute()
    try:
        for array, wanted in zip(submission.arrays, planned, strict=True):
            exclude = excluded_at(site, experiment, needed=wanted.shape.nodes)
            ids[array.name] = _submitted(
                site, submission, array, wanted, after=ids.get(array.after), exclude=exclude
            )
        if submission.report:
            command = _report_command(experiment, submission)
            ids[submission.report] = arrays.submit_single(
                site,
                folder,
                name=submission.report,
                nodes=1,
                command=command,
                after=[*live, *ids.values()],
                code=submission.code,
            )
    except SlurmError as refusal:
        try:
            _withdraw(submission, ids)
        except SlurmError as error:
            queued = ", ".join(ids.values())
            raise SlurmError(f"{refusal}; the jobs before it ({queued}) are still queued: {error}") from None
        raise
    submitted = replace(
        submission,
        state="submitted",
        arrays=tuple(replace(array, id=ids[array.name]) for array in submission.arrays),
    )
    write_submission(submitted)
    return submitted


def _submitted(
    site: Site,
    submission: Submission,
    array: Array,
    wanted: PlannedArray,
    *,
    after: str | None,
    exclude: str,
) -> str:
    """SLURM's number of an array that it has taken.

    Raises:
        SlurmError: it refuses; names the shape, and the keys of the profile that have to do with it.
    """
    try:
        return arrays.submit(
            site,
            submission.folder.absolute(),
            name=array.name,
            shape=wanted.shape,
            tasks=len(wanted.runs),
            at_once=wanted.turn.at_once,
            after=after,
            code=submission.code,
            file=array.file,
            exclude=exclude,
        )
    except SlurmError as error:
        count = "1 run" if len(wanted.runs) == 1 else f"{len(wanted.runs)} runs"
        raise SlurmError(
            f"{site.file}: {keys_of(str(error))}: {error} (asked for {count} of {wanted.shape})"
        ) from None


def _withdraw(submission: Submission, ids: Mapping[str, str]) -> None:
    """Take back what was queued before sbatch refused."""
    write_submission(replace(submission, state="withdrawn"))
    slurm.cancel(list(ids.values()))


def report_file(experiment: Experiment) -> Path:
    """Where the report of a dependent job goes."""
    return experiment.folder / "report.md"


def _report_command(experiment: Experiment, submission: Submission) -> list[str]:
    folder = experiment.folder.absolute()
    out = report_file(experiment).absolute()
    words = ["report", str(folder), "--format", "markdown", "--out", str(out)]
    return [submission.interpreter, "-P", "-m", "asyncpp_cli", *words]


def script(experiment: Experiment, site: Site, array: PlannedArray) -> str:
    """The script that an array would be submitted with."""
    return arrays.script_of(
        site,
        Path(experiment.submissions.absolute()),
        name=f"asyncpp-{experiment.name}",
        shape=array.shape,
        tasks=len(array.runs),
        at_once=array.turn.at_once,
        code=snapshot.code_hash(),
        file="array-1.json",
        exclude=excluded_at(site, experiment, needed=array.shape.nodes),
    )
