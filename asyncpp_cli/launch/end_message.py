"""Runs the user's command when a launch has ended (`on_end` of the site profile)."""

from __future__ import annotations

import os
import subprocess

from asyncpp_cli.console import say
from asyncpp_cli.launch.sites import Site
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.status import State

_SECONDS = 60


def tell_end(experiment: Experiment, site: Site) -> None:
    """Run the site's `on_end` with a sentence on the experiment as its last word, without a shell.

    A command that fails is a remark: the launch has ended as it has.
    """
    if not site.on_end:
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
            [*site.on_end, sentence],
            env=dict(os.environ) | facts,
            stdin=subprocess.DEVNULL,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"on_end of {site.file}: {error}", one_line=True)
        return
    if ended.returncode != 0:
        say(f"on_end of {site.file}: {site.on_end[0]} ended with exit code {ended.returncode}", one_line=True)
