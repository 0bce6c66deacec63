"""The file of a run's status: replaced atomically, and reported when damaged."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from asyncpp_cli.atomic_files import read_json, write_json
from asyncpp_cli.errors import DamagedError
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.mark.slow
def test_a_status_is_replaced_at_once_while_others_read(run: Run) -> None:
    run.write_status(Status(state=State.RUNNING, reason="x" * 1000))
    writer = multiprocessing.get_context("fork").Process(target=_write_statuses, args=(run,))
    writer.start()
    read = 0
    while writer.is_alive() or read == 0:
        assert run.status().reason in {"x" * 1000, "y" * 100_000}
        read += 1
    writer.join()
    assert writer.exitcode == 0
    assert read > 10
    assert [file.name for file in run.folder.iterdir()] == ["status.json"]


def _write_statuses(run: Run) -> None:
    for number in range(400):
        reason = "x" * 1000 if number % 2 else "y" * 100_000
        run.write_status(Status(state=State.RUNNING, reason=reason))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 2, "state": "running"}', '{"format": 1, "state": "odd"}', '{"format": 1}'],
)
def test_a_damaged_status_is_reported_as_such(run: Run, text: str) -> None:
    run.status_file.write_text(text)
    with pytest.raises(DamagedError, match=r"status\.json"):
        run.status()
    assert current_status(run).state == State.DAMAGED
    assert "status.json" in current_status(run).reason


def test_json_files_keep_the_usual_permissions(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    write_json(tmp_path / "file", {"a": 1})
    assert (tmp_path / "file").stat().st_mode == plain.stat().st_mode
    assert read_json(tmp_path / "file", newest_format=1) == {"a": 1}
