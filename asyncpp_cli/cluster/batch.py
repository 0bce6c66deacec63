"""A job, on its first node: what `array_task` runs once it listens to signals.

It claims the next attempt at its run, starts the ranks through srun, and when they have all ended sees how
that went: one that was told to end or lost a node is put back into the queue; one that failed is tried again
on the spot, as long as it has retries left.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from asyncpp_cli.cluster import nodes, slurm
from asyncpp_cli.cluster.attempts import Attempt, settle, settle_again
from asyncpp_cli.cluster.avoiding import (
    exclude_from_requeued,
    exclude_from_waiting,
    fault_of_nodes,
    note_broken,
)
from asyncpp_cli.cluster.claims import claim
from asyncpp_cli.cluster.job_end import JobEnd, seen_from_job
from asyncpp_cli.cluster.job_states import Phase, phase_of
from asyncpp_cli.cluster.jobs import Job
from asyncpp_cli.cluster.passing_on import pass_on
from asyncpp_cli.cluster.queue import Queue
from asyncpp_cli.cluster.slurm import SlurmError
from asyncpp_cli.cluster.snapshot import code_hash, difference, file_hash
from asyncpp_cli.cluster.submissions import read_submissions
from asyncpp_cli.cluster.supervise import LIMIT_VARIABLE
from asyncpp_cli.cluster.table import ArrayTable, Row, read_table
from asyncpp_cli.cluster.told import told, undisturbed
from asyncpp_cli.runs import Cause, Experiment, Run, State, Status, open_experiment
from stages.signals import RESUMABLE

_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_EARLIER = 75.0
"""SLURM may send its signal a minute earlier than it is told to."""
_SECONDS_OF_CLOCKS = 2.0
"""SLURM tells its times in whole seconds, and the clocks of its machines may differ."""
_SECONDS_TO_BE_ENDED = 120.0


def run_task(file: str) -> int:
    """Run the run that this array task stands for. The job's exit code.

    Args:
        file: the array's table.
    """
    table = read_table(Path(file))
    index = int(os.environ["SLURM_ARRAY_TASK_ID"])
    row = table.rows[index]
    experiment = open_experiment(Path.cwd().parents[1])
    run = experiment.run(row.id)
    job = _this_job(table, index)
    _say(f"{job.id} (start {job.restart + 1}) on {job.nodes}: {row.id}")
    _first_end(job.id)
    _end_earlier_start(experiment, run, job)
    while (code := _attempt(experiment, run, table, row, job)) is None:
        pass
    _pass_on_place(experiment, table, index)
    return code


def _attempt(experiment: Experiment, run: Run, table: ArrayTable, row: Row, job: Job) -> int | None:
    """Make one attempt. The job's exit code; None if there is to be another attempt."""
    attempt = claim(
        run,
        processes=table.shape.tasks,
        replay=table.replay,
        steps=row.steps,
        job=job,
        site_settings=table.site_settings,
        scheduler=Queue(experiment),
    )
    if attempt is None:
        status = run.status()
        _say(f"nothing to do: the run is {status.state} (attempt {status.attempt})")
        return 0
    code = None
    if reason := _refusal(run, table, row):
        attempt.write("refused", {"reason": reason})
    else:
        code = _run_ranks(attempt, table, job)
    status = _seen_from_here(settle(run, none_to_come=True, all_over=True), attempt, table, job, code)
    _say(f"attempt {attempt.number}: {status.state} {status.reason}")
    if status.attempt != attempt.number:
        return 1  # SLURM has started the run elsewhere, having lost sight of this job
    return _what_follows(status, experiment, run, table, job)


def _this_job(table: ArrayTable, index: int) -> Job:
    return Job(
        cluster=table.cluster,
        name=table.name,
        index=index,
        id=f"{os.environ['SLURM_ARRAY_JOB_ID']}_{index}",
        restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        nodes=os.environ.get("SLURM_JOB_NODELIST", ""),
        submission=table.submission,
    )


def _end_earlier_start(experiment: Experiment, run: Run, job: Job) -> None:
    """Settle what an earlier start of this same job could not: SLURM starts no job before it has ended it."""
    status = run.status()
    attempt = Attempt(run, status.attempt)
    before = attempt.job if status.attempt else None
    if before is None or (before.name, before.index) != (job.name, job.index):
        return
    if before.restart < job.restart:
        note_broken(experiment, attempt, before)
    reason = f"SLURM took its nodes away ({before.nodes}) and started the job again"
    if status.state == State.RUNNING:
        attempt.stop(reason, cause=Cause.RESTARTED)
        settle(run, none_to_come=True, all_over=True)
    elif status.state == State.FAILED and before.restart < job.restart:
        # Ranks were seen to vanish, and this process, which would have known why, was gone as well.
        reason = f"{reason}; {status.reason}"
        settle_again(attempt, state=State.INTERRUPTED, cause=Cause.RESTARTED, reason=reason)


def _refusal(run: Run, table: ArrayTable, row: Row) -> str:
    """Why this job must not begin; empty if it may."""
    if changed := difference(table.software):
        return f"{changed} since it was submitted: launch again"
    if file_hash(run.config_file) != row.config_sha256:
        return f"{run.config_file.name} has changed since it was submitted: launch again"
    if code_hash() != table.code:
        return f"code/{table.code} has changed since it was submitted: launch again"
    return ""


def _run_ranks(attempt: Attempt, table: ArrayTable, job: Job) -> int | None:
    """Start the ranks, wait for them to end, and pass on what this process is told. srun's exit code."""
    site = replace(attempt.run.config().site, **table.site_settings)
    command = [
        "srun",
        f"--ntasks={table.shape.tasks}",
        f"--cpus-per-task={table.shape.cpus_per_task}",
        # A rank that is gone ends the others, should they not notice by themselves.
        "--kill-on-bad-exit=1",
        f"--wait={round(site.grace) + 60}",
        "--export=ALL",
        "--unbuffered",
        *table.srun_flags,
        *[sys.executable, "-P", "-m", "asyncpp_cli.cluster.task"],
        *[str(attempt.run.folder), str(attempt.number)],
    ]
    environment = slurm.without_place(os.environ)
    if (limit := _limit(job)) is not None:
        environment[LIMIT_VARIABLE] = str(limit - table.signal_lead - _SECONDS_EARLIER)
    if table.network_interface is not None:
        environment |= {
            "GLOO_SOCKET_IFNAME": table.network_interface,
            "NCCL_SOCKET_IFNAME": table.network_interface,
        }
    if told:
        attempt.stop(f"the job was told to end by {told[0].name}")
        return None
    ranks = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    passed_on = False
    while ranks.poll() is None:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
        if told and not passed_on:
            passed_on = True
            attempt.stop(f"the job was told to end by {told[0].name}")
    return ranks.returncode


def _seen_from_here(
    status: Status, attempt: Attempt, table: ArrayTable, job: Job, srun_code: int | None
) -> Status:
    """The status, corrected by what only the job knows."""
    if status.state == State.COMPLETED:
        return status
    limit, now = _limit(job), time.time()
    end = JobEnd(
        srun_code=srun_code,
        told=bool(told),
        phase=_phase(job),
        broken=bool(nodes.broken(job.nodes)),
        limit_near=limit is not None and now > limit - table.signal_lead - _SECONDS_EARLIER,
        limit_reached=limit is not None and now > limit - _SECONDS_OF_CLOCKS,
    )
    better = seen_from_job(status, attempt, ranks=table.shape.tasks, end=end)
    if better is None:
        return status
    state, cause, reason = better
    return settle_again(attempt, state=state, cause=cause, reason=reason)


def _limit(job: Job) -> float | None:
    """When the job's time limit ends it, in seconds since 1970."""
    # Once it is preempted, SLURM has an earlier end for it, by which it takes the nodes: that is no limit.
    ends = [end for end in (_first_end(job.id), slurm.end_of_job(job.id)) if end is not None]
    return max(ends, default=None)


@functools.cache
def _first_end(job_id: str) -> float | None:
    """When the job's time limit ended it as SLURM had it when it was first asked."""
    return slurm.end_of_job(job_id)


def _phase(job: Job) -> Phase | None:
    try:
        return phase_of(slurm.state_of(job.id))
    except SlurmError:
        return None


def _what_follows(
    status: Status, experiment: Experiment, run: Run, table: ArrayTable, job: Job
) -> int | None:
    """Put the run back into the queue if it is to. The job's exit code; None: try again here."""
    if status.state == State.COMPLETED or status.cause == Cause.CANCELLED:
        return 0
    if status.state == State.INTERRUPTED:
        return _requeue(status, experiment, table, job)
    if status.cause == Cause.REFUSED:
        return 1
    attempt = Attempt(run, status.attempt)
    if reason := fault_of_nodes(experiment, attempt, table, job):
        reason = f"{reason}; {status.reason}"
        status = settle_again(attempt, state=State.INTERRUPTED, cause=Cause.RESTARTED, reason=reason)
        _say(f"no failure of the run: {reason}")
        return _requeue(status, experiment, table, job)
    failed = failures(run, submission=table.submission)
    if failed > table.retries:
        return 1
    _say(f"failure {failed}: trying again, {table.retries - failed} retries left after that")
    return _requeue(status, experiment, table, job) if told else None


def failures(run: Run, *, submission: str) -> int:
    """How many attempts of a submission at the run have failed."""
    count = 0
    for number in range(1, run.status().attempt + 1):
        attempt = Attempt(run, number)
        outcome, job = attempt.read("outcome"), attempt.job
        if outcome is not None and job is not None and job.submission == submission:
            count += outcome["state"] == State.FAILED
    return count


def _pass_on_place(experiment: Experiment, table: ArrayTable, index: int) -> None:
    """Let another array of the launch have the place of this job, which ends for good."""
    for submission in read_submissions(experiment).all:
        if submission.name == table.submission:
            try:
                heir = pass_on(submission, name=table.name, index=index)
            except SlurmError as error:
                _say(f"the place of this job stays empty: {error}")
            else:
                if heir is not None:
                    _say(f"the place of this job goes to {heir}")


def _requeue(status: Status, experiment: Experiment, table: ArrayTable, job: Job) -> int:
    """Queue this job again. The exit code where that is not to be or is not possible."""
    code = RESUMABLE if status.state == State.INTERRUPTED else 1
    try:
        state = slurm.state_of(job.id)
        if phase_of(state) is not Phase.RUNS and status.cause != Cause.TIME_LIMIT:
            _say(f"the job is {state.lower()}: SLURM, or a person, has decided what becomes of it")
            return code
        # Before this job makes room for them; for the job itself SLURM takes it only afterwards.
        exclude_from_waiting(experiment, cluster=table.cluster)
    except SlurmError as error:
        _say(f"not queued again ({error}): launch again to go on")
        return code
    told_before = len(told)
    try:
        with undisturbed():
            slurm.requeue(job.id)
            exclude_from_requeued(experiment, table, job)
    except SlurmError as error:
        # It may have been done for all that: SLURM was too slow to say so, or its answer was lost.
        if len(told) == told_before and _phase(job) not in (Phase.WAITS, Phase.ENDS):
            _say(f"not queued again ({error}): launch again to go on")
            return code
    _say("queued again")
    # SLURM ends this process. Whoever waits for the nodes waits for that.
    deadline = time.monotonic() + _SECONDS_TO_BE_ENDED
    while len(told) == told_before and time.monotonic() < deadline:
        time.sleep(0.05)
    return code


def _say(message: str) -> None:
    print(f"{time.strftime('%F %T')} {message}", flush=True)
