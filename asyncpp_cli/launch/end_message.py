"""Runs the user's command when a launch has ended (`on_end` of the site profile)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from asyncpp_cli.console import say
from asyncpp_cli.launch.slurm.submissions import read_submissions
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.status import State

_SECONDS = 60
_TOLD = "end-told"
"""In the submission's folder, once its end has been told."""


def tell_end(experiment: Experiment, command: Sequence[str], *, source: Path) -> None:
    """Run `command` with a sentence on the experiment as its last word, without a shell.

    A command that fails is a remark: the launch has ended as it has.

    Args:
        experiment: the experiment.
        command: `on_end` of the site; empty: none.
        source: file of the site's profile.
    """
    if not command:
        return
    states = [current_status(run).state for run in experiment.runs]
    completed = sum(state == State.COMPLETED for state in states)
    sentence = f"{experiment.name}: {completed} of {len(states)} runs completed in {experiment.folder}"
    facts = {
        "ASYNCPP_FOLDER": str(experiment.folder.absolute()),
        "ASYNCPP_COMPLETED": str(completed),
        "ASYNCPP_RUNS": str(len(states)),
    }
    try:
        ended = subprocess.run(
            [*command, sentence],
            env=dict(os.environ) | facts,
            stdin=subprocess.DEVNULL,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"on_end of {source}: {error}", one_line=True)
        return
    if ended.returncode != 0:
        say(f"on_end of {source}: {command[0]} ended with exit code {ended.returncode}", one_line=True)


def claim_end(experiment: Experiment, *, submission: str | None = None) -> bool:
    """Whether the caller is the one to tell that the experiment's jobs have ended; True once per submission.

    Args:
        experiment: the experiment.
        submission: name of the caller's submission, which must be the last one; None: any.
    """
    submissions = [entry for entry in read_submissions(experiment).all if entry.state != "withdrawn"]
    if not submissions:
        return submission is None
    last = submissions[-1]
    if submission not in (None, last.name):
        return False  # a later launch tells its own end
    try:
        (last.folder / _TOLD).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
