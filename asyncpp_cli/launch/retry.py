"""Choosing which runs `asyncpp retry` starts again."""

from __future__ import annotations

from collections.abc import Collection

from asyncpp_cli.launch.slurm.run_status import SlurmQueue
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.status import Cause, State


def runs_to_retry(
    experiment: Experiment, *, named: Collection[str], failed: bool, timeout: bool, oom: bool
) -> dict[str, str]:
    """Ids of the runs to start again, each with the site it was last submitted to (empty: none).

    Completed, running and queued runs are never chosen.

    Args:
        experiment: the experiment.
        named: ids of runs to choose whatever ended them.
        failed: choose runs that failed or are damaged.
        timeout: choose runs that a time limit ended.
        oom: choose runs that ran out of memory.
    """
    queue = SlurmQueue(experiment)
    chosen = {}
    for run in experiment.runs:
        run_status = queue.run_status(run, with_accounting=True)
        status = run_status.status
        if status.state in (State.COMPLETED, State.RUNNING) or run_status.has_job:
            continue
        wanted = run.id in named or (failed and status.state in (State.FAILED, State.DAMAGED))
        if timeout:
            wanted |= status.cause == Cause.TIME_LIMIT or run_status.job_state == "TIMEOUT"
        if oom:
            wanted |= status.cause == Cause.OUT_OF_MEMORY or run_status.job_state == "OUT_OF_MEMORY"
        if wanted:
            chosen[run.id] = run_status.site
    return chosen


def reasons_skipped(experiment: Experiment, named: Collection[str]) -> list[str]:
    """For each named run that is not started again, one line with the reason."""
    queue = SlurmQueue(experiment)
    lines = []
    for run in experiment.runs:
        if run.id not in named:
            continue
        run_status = queue.run_status(run, with_accounting=False)
        status = run_status.status
        if status.state == State.COMPLETED:
            lines.append(f"{run.id} is completed: nothing is left to train")
        elif status.state == State.RUNNING:
            lines.append(f"{run.id} is running on {status.host}, attempt {status.attempt}")
        elif run_status.has_job:
            lines.append(f"{run.id} is queued as job {run_status.job_id}")
    return lines
