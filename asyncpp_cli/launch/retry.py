"""Choosing which runs `asyncpp launch` starts, and repairing those that are damaged."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from asyncpp_cli.base.console import command, say
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.runs.attempts.repair import repair_run
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import Cause, State
from asyncpp_cli.sites.profile import LOCAL
from asyncpp_cli.slurm.run_status import SlurmQueue


def chosen_by_site(
    experiment: Experiment, runs: Sequence[Run], *, failed: bool, timeout: bool, oom: bool, site: str | None
) -> dict[str, list[str] | None]:
    """Ids of the runs to start, by site; says which named runs have nothing to start. Repairs damaged ones.

    Args:
        experiment: the experiment.
        runs: runs to choose whatever ended them.
        failed: choose runs that failed or are damaged.
        timeout: choose runs that a time limit ended.
        oom: choose runs that ran out of memory.
        site: where to start all of them; None: where each was submitted last, or here.
    """
    named = {run.id for run in runs}
    chosen = runs_to_retry(experiment, named=named, failed=failed, timeout=timeout, oom=oom)
    for line in reasons_skipped(experiment, named):
        say(line)
    kinds = {"failed": failed, "reached a time limit": timeout, "ran out of memory": oom}
    if not chosen and (wanted := " or ".join(kind for kind, is_wanted in kinds.items() if is_wanted)):
        say(f"None of the {len(experiment.runs)} runs {wanted}: {command('status', experiment.folder)}")
    by_site: dict[str, list[str] | None] = {}
    for run_id, submitted_to in chosen.items():
        try:
            if done := repair_run(experiment.run(run_id)):
                say(done)
        except UserError as error:
            say(f"left out: {error}")
            continue
        name = site or submitted_to or LOCAL
        by_site[name] = [*(by_site.get(name) or ()), run_id]
    return by_site


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
        if status.state == State.COMPLETED or run_status.is_live:
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
