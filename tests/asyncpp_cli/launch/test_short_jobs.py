"""Runs that advance a few steps per job are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncpp_cli.runs.attempts.claims import claim
from asyncpp_cli.runs.attempts.settle import override_outcome, settle
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import Cause, State
from asyncpp_cli.slurm.run_status import RunStatus, short_job_notes
from stages.checkpoint.files import folder_of


@pytest.mark.parametrize(
    ("cause", "saved", "words"),
    [
        (Cause.TIME_LIMIT, 4, "saves about 2 steps per job of mine, and needs about 498 more jobs"),
        (Cause.TIME_LIMIT, 0, "saves about 0 steps per job of mine, and will not end so"),
        (Cause.TIME_LIMIT, 400, ""),
        (Cause.STOPPED, 4, ""),
    ],
)
def test_runs_that_save_few_steps_per_job_are_named(
    tmp_path: Path, cause: Cause, saved: int, words: str
) -> None:
    run = Run(tmp_path / "runs" / "a")
    run.folder.mkdir(parents=True)
    for _ in range(2):
        attempt = claim(run, processes=1, replay=True, steps=1000)
        assert attempt is not None
        settle(run, none_to_come=True, all_over=True)
        override_outcome(attempt, state=State.INTERRUPTED, cause=cause, reason="")
    if saved:
        folder_of(run.checkpoints, saved).mkdir(parents=True)
    notes = short_job_notes([RunStatus(run=run, status=run.status(), site="mine")])
    assert [words in note for note in notes] == ([True] if words else [])
    assert short_job_notes([RunStatus(run=run, status=run.status())]) == []  # no job of a cluster
