"""One damaged run never blocks an experiment: it is shown as damaged, and everything else goes on."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from support.attempts import claimed
from support.command_line import asyncpp, succeeded
from support.files import edit
from support.report_experiment import JSON, ExperimentFolder, begun, settings

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import RankEnd
from asyncpp_cli.runs.attempts.repair import repair_run
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status


@pytest.fixture
def experiment() -> Iterator[ExperimentFolder]:
    """Two completed runs."""
    with tempfile.TemporaryDirectory() as folder:
        yield made_in(Path(folder))


def made_in(folder: Path, *, runs: int = 2) -> ExperimentFolder:
    made = ExperimentFolder(folder / "experiment")
    for number in range(runs):
        # Each a cell of its own.
        rate = {"optimizer.lr": 1e-3 * (number + 1)}
        begun(made.add(settings("1f1b", "muon", **rate), status=Status(state=State.PENDING), axes=rate))
    return made


def going_on(run: Run) -> None:
    """Make it an attempt of which nothing says how it ended."""
    edit(run.status_file, state="running")
    for file in ("rank-0.end.json", "outcome.json"):
        (run.attempts / "1" / file).unlink()
    file = run.attempts / "1" / "rank-0.json"
    [process] = json.loads(file.read_text())["processes"]
    edit(file, processes=[process | {"start": process["start"] + 1}])  # it has ended since


def status_of(text: str) -> Callable[[Run], object]:
    return lambda run: run.status_file.write_text(text, errors="surrogateescape")


def changed(**fields: Any) -> Callable[[Run], object]:
    return lambda run: edit(run.status_file, **fields)


def attempt_of(text: str) -> Callable[[Run], object]:
    return lambda run: (going_on(run), (run.attempts / "1" / "attempt.json").write_text(text))


DAMAGES: dict[str, tuple[Callable[[Run], object], str]] = {
    "torn status": (status_of('{"format": 1, "sta'), "/status.json"),
    "status is no text": (status_of("\udcff\udcfe"), "/status.json"),
    "format is a later one": (changed(format=2), "/status.json"),
    "unknown state": (changed(state="odd"), "/status.json"),
    "state says damaged": (changed(state="damaged"), "/status.json"),
    "attempt is huge": (changed(attempt=10**400), "/status.json"),
    "status is a folder": (lambda run: (run.status_file.unlink(), run.status_file.mkdir()), "/status.json"),
    "no attempts": (lambda run: (going_on(run), shutil.rmtree(run.attempts)), "/attempts/1/attempt.json"),
    "no processes": (attempt_of('{"format": 1}'), "/attempts/1/attempt.json"),
    "no json": (attempt_of("{"), "/attempts/1/attempt.json"),
    "folder is gone": (lambda run: shutil.rmtree(run.folder), ""),
    "folder is a file": (lambda run: (shutil.rmtree(run.folder), run.folder.write_text("")), ""),
}


@pytest.mark.slow
def test_every_command_goes_on_beside_damaged_runs(tmp_path: Path) -> None:
    experiment = made_in(tmp_path, runs=1 + len(DAMAGES))
    folder = experiment.folder
    for number, (harm, _) in enumerate(DAMAGES.values(), 1):
        harm(Run(folder / "runs" / f"run-{number}"))

    shown = succeeded("status", folder)
    assert f"1 completed, {len(DAMAGES)} damaged" in shown.output
    [whole, *damaged] = json.loads(asyncpp("status", folder, "--json").output)
    assert whole["state"] == "completed"
    launched = asyncpp("launch", folder)
    assert launched.code == 1
    assert f"1 of {1 + len(DAMAGES)} runs completed" in launched.errors
    for number, (what, (_, file)) in enumerate(DAMAGES.items()):
        status = damaged[number]
        assert (what, status["state"]) == (what, "damaged")
        assert f"{status['id']}{file}" in status["reason"]
        assert f"{status['id']}{file}" in "".join(shown.output.split())
        assert f"{status['id']}{file}" in launched.errors
        assert asyncpp("logs", folder, status["id"], "--attempt", "1").code in (0, 2)

    shown = succeeded("report", folder, "--format", "json")
    cells = {name: cell for cell in json.loads(shown.output) for name in cell["runs"]}
    assert cells.pop("run-0")["status"] == "completed"
    assert {cell["status"] for cell in cells.values()} == {"damaged", "missing"}
    assert asyncpp("logs", folder, "run-0").output == "a line\n"
    for arguments in (("report", folder), ("cancel", folder), ("mirror", folder, "--to", "tensorboard")):
        succeeded(*arguments)
    assert current_status(Run(folder / "runs" / "run-0")).state == State.COMPLETED


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_can_be_set_right(experiment: ExperimentFolder, damage: str) -> None:
    run = Run(experiment.folder / "runs" / "run-1")
    DAMAGES[damage][0](run)
    if damage.startswith("folder"):
        with pytest.raises(UserError, match="asyncpp sweep"):
            repair_run(run)
        return
    before = run.status_file.read_bytes() if run.status_file.is_file() else None
    repair_run(run)
    status = current_status(run)
    whole = damage not in ("no attempts", "no processes", "no json")
    # What its attempt says of its end still holds.
    assert status.state == (State.COMPLETED if whole else State.INTERRUPTED)
    assert status.attempt == 1
    [kept] = run.folder.glob("status.json.damaged-*")
    assert before is None or kept.read_bytes() == before
    if not whole:
        attempt = claimed(run, processes=1, replay=True, steps=4)
        assert attempt.number == 2


def test_a_damaged_run_whose_processes_are_there_is_left_alone(experiment: ExperimentFolder) -> None:
    run = Run(experiment.folder / "runs" / "run-1")
    run.status_file.write_text("{")
    # Its process is this one, and nothing says that it has ended.
    (run.attempts / "1" / "rank-0.end.json").unlink()
    with pytest.raises(UserError, match="still running"):
        repair_run(run)
    assert current_status(run).state == State.DAMAGED


FILES = (
    *("status.json", "metrics.jsonl", "timeline.json", "config.yaml", "attempts/1/attempt.json"),
    *("attempts/1/rank-0.json", "attempts/1/rank-0.end.json", "attempts/1/rank-0.error.json"),
    *("attempts/1/stop.json", "attempts/1/refused.json", "attempts/1/outcome.json"),
    "attempts/1/fallen.json",
)


@settings_of_hypothesis(max_examples=10, deadline=None)
@given(
    *(st.sampled_from(FILES), st.integers(0, 30), JSON),
    *(st.none() | st.binary(max_size=20), st.integers(0, 400), st.booleans()),
)
@pytest.mark.slow
def test_no_damage_to_any_file_ends_a_command(
    file: str, field: int, value: Any, raw: bytes | None, cut: int, running: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        experiment = made_in(Path(folder))
        run = Run(experiment.folder / "runs" / "run-1")
        if running:
            going_on(run)
        damaged = run.folder / file
        damaged.write_bytes(spoilt(damaged, field, value, raw, cut))
        commands: list[tuple[str | Path, ...]] = [
            ("status", experiment.folder),
            ("report", experiment.folder, "--format", "csv"),
            ("logs", experiment.folder, ""),
            ("launch", experiment.folder, "--oom", "--timeout"),
            ("mirror", experiment.folder, "--to", "tensorboard"),
        ]
        for arguments in commands:
            ended = asyncpp(*arguments)
            assert ended.code == 0 or (arguments[0] in ("logs", "launch") and ended.code in (1, 2)), ended
            assert "Traceback" not in ended.errors
        [whole, _] = json.loads(asyncpp("status", experiment.folder, "--json").output)
        assert whole["state"] == "completed"


def spoilt(file: Path, field: int, value: Any, raw: bytes | None, cut: int) -> bytes:
    """The file's content with a field of another kind, with bytes of any kind, or cut off."""
    content = (
        file.read_bytes() if file.exists() else b'{"reason": "x", "cause": "error", "time": 1.0, "kind": "x"}'
    )
    if raw is not None:
        return content[:cut] + raw
    first, _, rest = content.partition(b"\n")
    try:
        fields = json.loads(first)
    except ValueError:
        return content[:cut]
    names = list(fields)
    fields[names[field % len(names)]] = value
    return json.dumps(fields).encode() + b"\n" + rest


def test_the_attempt_of_a_run_says_what_is_damaged(experiment: ExperimentFolder) -> None:
    run = Run(experiment.folder / "runs" / "run-1")
    going_on(run)
    (run.attempts / "1" / "rank-0.end.json").write_text('{"code": "x"}')
    status = current_status(run)
    assert status.state == State.FAILED
    assert Attempt(run, 1).read(RankEnd, 0) is None
