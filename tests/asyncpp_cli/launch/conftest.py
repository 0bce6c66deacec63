"""Launches that end with their test, and clocks that it sets."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import succeeded
from support.launches import LONG, Launched, SetClock, StartLaunch, processes_of, sweep

from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.processes import send_signal
from asyncpp_cli.runs.run_folder import Run


@pytest.fixture
def start_launch(tmp_path: Path) -> Iterator[StartLaunch]:
    """Starts `asyncpp launch`. Nothing of it outlives the test."""
    started: list[Launched] = []

    def start(folder: Path, *arguments: str) -> Launched:
        started.append(Launched(folder, *arguments, output=tmp_path / f"launch-{len(started)}"))
        return started[-1]

    yield start
    for launched in started:
        launched.process.kill()
        launched.finish(seconds=250)
        for run in open_experiment(launched.folder).runs:
            for process in processes_of(run):
                send_signal(process, signal.SIGKILL)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The long run that tests kill and freeze, trained in this process without a disturbance."""
    [run] = sweep(tmp_path_factory.mktemp("undisturbed") / "e", *LONG).runs
    succeeded("train", run.folder, "--replay")
    return run


@pytest.fixture
def set_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """Sets the clocks of all commands and processes that are started from here."""
    file = tmp_path / "clock"

    def to(ahead: float, per_rank: float) -> None:
        file.with_name("new").write_text(f"{ahead} {per_rank}")
        file.with_name("new").replace(file)

    to(0.0, 0.0)
    monkeypatch.setenv("ASYNCPP_TEST_CLOCK", str(file))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "support" / "set_clock"))
    return to
