"""Launches that end with their test."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launches import Launched, StartLaunch, processes_of

from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.processes import send_signal


@pytest.fixture
def start_launch(tmp_path: Path) -> Iterator[StartLaunch]:
    """Starts `asyncpp launch`. Nothing of it outlives the test."""
    started: list[Launched] = []

    def start(folder: Path, *arguments: str) -> Launched:
        started.append(Launched(folder, arguments, output=tmp_path / f"launch-{len(started)}"))
        return started[-1]

    yield start
    for launched in started:
        launched.process.kill()
        launched.finish(seconds=250)
        for run in open_experiment(launched.folder).runs:
            for process in processes_of(run):
                send_signal(process, signal.SIGKILL)
