"""Executes one run as an array task, on the first node of the job.

The task claims the next attempt at its run and starts the ranks through srun. Afterwards, a run that was
stopped or lost a node is requeued; a run that failed is started again at once while it has retries left.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from asyncpp_cli.launch.common.arrays import ArrayManifest, ManifestRow
from asyncpp_cli.launch.common.early_signals import received, signals_blocked
from asyncpp_cli.launch.common.snapshot import code_hash, difference, file_hash
from asyncpp_cli.launch.common.srun_command import network_variables, srun_command
from asyncpp_cli.launch.common.supervisor import LIMIT_VARIABLE
from asyncpp_cli.launch.job.job_end import JobEnd, corrected_outcome
from asyncpp_cli.launch.job.time_limit import CLOCK_TOLERANCE, EARLY_SECONDS, first_end_time, time_limit
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.claims import claim
from asyncpp_cli.runs.attempts.files import Job, Outcome, Refused
from asyncpp_cli.runs.attempts.settle import Knowledge, override_outcome, settle
from asyncpp_cli.runs.experiment_folder import Experiment, open_experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import Cause, State, Status
from asyncpp_cli.slurm import client as slurm
from asyncpp_cli.slurm.client import JobPhase, SlurmError, phase_of
from asyncpp_cli.slurm.run_status import SlurmQueue
from stages.config.records import read_record
from stages.liveness.stop_signal import RESUMABLE

_POLL_SECONDS = 0.2
_SECONDS_TO_BE_ENDED = 120.0
"""Longest wait, after requeueing, until SLURM kills this process."""


def run_task(file: str) -> int:
    """Execute the run of this array task; returns the job's exit code.

    Args:
        file: the array's manifest.
    """
    manifest = read_record(Path(file), ArrayManifest)
    index = int(os.environ["SLURM_ARRAY_TASK_ID"])
    row = manifest.rows[index]
    experiment = open_experiment(Path.cwd().parents[1])
    run = experiment.run(row.id)
    job = _this_job(manifest, index)
    _say(f"{job.id} (start {job.restart + 1}) on {job.nodes}: {row.id}")
    first_end_time(job.id)  # before a preemption can move it
    _settle_earlier_start(run, job)
    while (code := _attempt(experiment, run, manifest, row, job)) is None:
        pass
    return code


def _attempt(
    experiment: Experiment, run: Run, manifest: ArrayManifest, row: ManifestRow, job: Job
) -> int | None:
    """Make one attempt; returns the job's exit code, or None if another attempt follows."""
    attempt = claim(
        run,
        processes=manifest.shape.tasks,
        replay=manifest.replay,
        steps=row.steps,
        gpus=manifest.shape.tasks if manifest.shape.gpus_per_node else 0,
        threads=manifest.shape.cpus_per_task,
        until=row.until,
        job=job,
        site_settings=manifest.site_settings,
        scheduler=SlurmQueue(experiment),
    )
    if attempt is None:
        status = run.status()
        _say(f"nothing to do: the run is {status.state} (attempt {status.attempt})")
        return 0
    code = None
    if reason := _refusal(run, manifest, row):
        attempt.write(Refused(reason=reason))
    else:
        code = _run_ranks(attempt, manifest, job)
    status = _corrected(settle(run, Knowledge(all_over=attempt.number)), attempt, manifest, job, code)
    _say(f"attempt {attempt.number}: {status.state} {status.reason}")
    if status.attempt != attempt.number:
        return 1  # SLURM lost contact with this job and has started the run elsewhere
    return _what_follows(status, run, manifest, job)


def _this_job(manifest: ArrayManifest, index: int) -> Job:
    return Job(
        cluster=manifest.cluster,
        name=manifest.name,
        index=index,
        id=f"{os.environ['SLURM_ARRAY_JOB_ID']}_{index}",
        restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        nodes=os.environ.get("SLURM_JOB_NODELIST", ""),
        submission=manifest.submission,
    )


def _settle_earlier_start(run: Run, job: Job) -> None:
    """Settle the attempt of an earlier start of this job: SLURM ends a job before it starts it again."""
    status = run.status()
    attempt = Attempt(run, status.attempt)
    before = attempt.job if status.attempt else None
    if before is None or (before.name, before.index) != (job.name, job.index):
        return
    reason = f"SLURM took its nodes away ({before.nodes}) and started the job again"
    if status.state == State.RUNNING:
        attempt.stop(reason, cause=Cause.RESTARTED)
        settle(run, Knowledge(all_over=attempt.number))
    elif status.state == State.FAILED and before.restart < job.restart:
        # Ranks vanished together with this process, which would have recorded why.
        reason = f"{reason}; {status.reason}"
        override_outcome(attempt, state=State.INTERRUPTED, cause=Cause.RESTARTED, reason=reason)


def _refusal(run: Run, manifest: ArrayManifest, row: ManifestRow) -> str:
    """Why this job must not start; empty if it may."""
    if changed := difference(manifest.software):
        return f"{changed} since it was submitted: launch again"
    if file_hash(run.config_file) != row.config_sha256:
        return f"{run.config_file.name} has changed since it was submitted: launch again"
    if code_hash() != manifest.code:
        return f"code/{manifest.code} has changed since it was submitted: launch again"
    return ""


def _run_ranks(attempt: Attempt, manifest: ArrayManifest, job: Job) -> int | None:
    """Start the ranks through srun and wait for them, passing on stop signals; returns srun's exit code."""
    environment = slurm.step_environment()
    if (limit := time_limit(job.id)) is not None:
        near = limit - manifest.signal_lead - EARLY_SECONDS
        environment[LIMIT_VARIABLE] = str(near - time.monotonic())
    environment |= network_variables(manifest.network_interface)
    command = srun_command(
        attempt.run,
        manifest,
        attempt=attempt.number,
        shape=manifest.shape,
        site_settings=manifest.site_settings,
        folder=Path.cwd(),
        environment=environment,
    )
    if received:
        attempt.stop(f"the job was told to end by {received[0].name}")
        return None
    try:
        ranks = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    except OSError as error:
        attempt.write(Refused(reason=f"srun cannot be run on {job.nodes}: {error.strerror}"))
        return None
    stop_requested = False
    while ranks.poll() is None:
        time.sleep(_POLL_SECONDS)
        if received and not stop_requested:
            stop_requested = True
            attempt.stop(f"the job was told to end by {received[0].name}")
    return ranks.returncode


def _corrected(
    status: Status, attempt: Attempt, manifest: ArrayManifest, job: Job, srun_code: int | None
) -> Status:
    """The status after correction by what only the job knows."""
    if status.state in (State.COMPLETED, State.PAUSED):
        return status
    limit, now = time_limit(job.id), time.monotonic()
    end = JobEnd(
        srun_code=srun_code,
        signalled=bool(received),
        phase=_phase(job),
        broken=slurm.broken_nodes(job.nodes),
        limit_near=limit is not None and now > limit - manifest.signal_lead - EARLY_SECONDS,
        limit_reached=limit is not None and now > limit - CLOCK_TOLERANCE,
    )
    outcome = corrected_outcome(status, attempt, ranks=manifest.shape.tasks, end=end)
    if outcome is None:
        return status
    state, cause, reason = outcome
    return override_outcome(attempt, state=state, cause=cause, reason=reason)


def _phase(job: Job) -> JobPhase | None:
    try:
        return phase_of(slurm.job_state(job.id))
    except SlurmError:
        return None


def _what_follows(status: Status, run: Run, manifest: ArrayManifest, job: Job) -> int | None:
    """Requeue the job if needed; returns its exit code, or None to start the run again here."""
    if status.state in (State.COMPLETED, State.PAUSED) or status.cause == Cause.CANCELLED:
        return 0
    if status.state == State.INTERRUPTED:
        return _requeue(status, job)
    if status.cause == Cause.REFUSED:
        return 1
    failed = failures(run, submission=manifest.submission)
    if failed > manifest.retries:
        return 1
    _say(f"failure {failed}: trying again, {manifest.retries - failed} retries left after that")
    return _requeue(status, job) if received else None


def failures(run: Run, *, submission: str) -> int:
    """Number of failed attempts of a submission at the run."""
    count = 0
    for number in range(1, run.status().attempt + 1):
        attempt = Attempt(run, number)
        outcome, job = attempt.read(Outcome), attempt.job
        if outcome is not None and job is not None and job.submission == submission:
            count += outcome.state == State.FAILED
    return count


def _requeue(status: Status, job: Job) -> int:
    """Requeue this job; returns the exit code for when it is not requeued, or has not been killed in time."""
    code = RESUMABLE if status.state == State.INTERRUPTED else 1
    try:
        state = slurm.job_state(job.id)
        ending = phase_of(state) is not JobPhase.RUNNING
        if ending and slurm.restarts(job.id) > job.restart:
            _say("SLURM has queued it again")
            return code
        if ending and status.cause != Cause.TIME_LIMIT:
            _say(f"not queued again: the job is already {state.lower()}")
            return code
    except SlurmError as error:
        _say(f"not queued again ({error}): launch again to go on")
        return code
    received_before = len(received)
    try:
        with signals_blocked():
            slurm.requeue(job.id)
    except SlurmError as error:
        # It may have worked all the same, if SLURM answered too late or the answer was lost.
        if len(received) == received_before and _phase(job) not in (JobPhase.PENDING, JobPhase.ENDING):
            _say(f"not queued again ({error}): launch again to go on")
            return code
    _say("queued again")
    # SLURM kills this process; until then the nodes are not free.
    deadline = time.monotonic() + _SECONDS_TO_BE_ENDED
    while len(received) == received_before and time.monotonic() < deadline:
        time.sleep(0.05)
    return code


def _say(message: str) -> None:
    print(f"{time.strftime('%F %T')} {message}", flush=True)
