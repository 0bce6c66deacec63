"""Runs whose jobs are too short: each job's time limit leaves it few steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncpp_cli.launch.slurm.run_status import RunStatus
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import Outcome
from asyncpp_cli.runs.status import Cause, State

_MANY_JOBS = 10
"""More jobs than this for the rest of a run are worth a word."""


def short_job_notes(run_statuses: Sequence[RunStatus]) -> list[str]:
    """One line for each run that needs many more jobs, where the time limit ended its last two."""
    notes = []
    for run_status in run_statuses:
        status, site = run_status.status, run_status.site
        ended = status.attempt - (status.state == State.RUNNING)
        if not site or ended < 2 or status.state in (State.COMPLETED, State.PAUSED):
            continue
        outcomes = [Attempt(run_status.run, number).read(Outcome) for number in (ended - 1, ended)]
        if any(outcome is None or outcome.cause != Cause.TIME_LIMIT for outcome in outcomes):
            continue
        per_job = (run_status.run.saved_step or 0) / ended
        left = math.ceil((status.steps - per_job * ended) / per_job) if per_job else None
        if left is None or left > _MANY_JOBS:
            jobs = "and will not end so" if left is None else f"and needs about {left:,} more jobs"
            notes.append(
                f"{run_status.run.id} saves about {per_job:,.3g} steps per job of {site}, {jobs}: "
                f"a longer `time` in that profile helps, or a shorter train.checkpoint_interval"
            )
    return notes
