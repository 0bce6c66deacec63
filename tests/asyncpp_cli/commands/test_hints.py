"""Commands that are shown to be typed next: they parse, and do what was done before."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from support.command_line import asyncpp, succeeded
from support.launches import TINY

from asyncpp_cli.base.console import command
from asyncpp_cli.launch.common.options import LaunchOptions
from asyncpp_cli.launch.start import resume_command
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.status import State, Status


def test_a_folder_that_begins_with_a_dash_is_no_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one_run = ["matrix={schedule: 2bw, optimizer: adamw}", "exclude=[]"]
    made = asyncpp("sweep", "quickstart", *TINY, *one_run, "--out=-a dash")
    hint = shlex.split(made.errors.rpartition("Next: ")[2])
    assert hint == ["asyncpp", "launch", "./-a dash"]
    succeeded("status", *hint[2:])
    (run,) = open_experiment(Path("-a dash")).runs
    options = LaunchOptions(replay=True, max_parallel=2)
    assert (
        resume_command([run], Path("-a dash"), options)
        == "asyncpp launch './-a dash' --replay --max-parallel 2"
    )
    # What was chosen to be tried again is chosen by its name: it has not failed this time.
    options = replace(options, only=[run.id])
    again = f"asyncpp launch './-a dash' {run.id} --replay --max-parallel 2"
    assert resume_command([run], Path("-a dash"), options) == again
    # A tuning pauses its runs, too, but says nothing of a step.
    options = replace(options, pauses={run.id: 3})
    said = resume_command([run], Path("-a dash"), options)
    assert said == "asyncpp tune './-a dash' --replay --max-parallel 2"
    assert resume_command([run], Path("-a dash"), replace(options, until=3)) == f"{again} --until 3"
    here = replace(options, pauses={}, site="here.yaml")
    assert resume_command([run], Path("-a dash"), here) == f"{again} --site here.yaml"
    run.write_status(Status(state=State.FAILED))
    succeeded("status", *shlex.split(command("status", Path("-a dash")))[2:])
