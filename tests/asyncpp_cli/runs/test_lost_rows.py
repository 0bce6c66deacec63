"""Rows of metrics that are lost: every command says so, and what the message names repairs the run.

And single bytes that change in any file of a run.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command_line import asyncpp, succeeded
from support.launches import ONE, launch_in_this_process, sweep
from support.report_experiment import cells_of
from support.rows import plain

from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.run_folder import Run
from stages.checkpoint.files import folder_of, rows_before

STEPS, FIRST, EARLY, LATE = 8, 2, 4, 6
TIMES = {"time", "seconds", "load_per_core", "memory", "checksum", "steady_seconds", "steady_tokens"}
"""What differs between two attempts at a step; replays have no other times."""


def rows_at(run: Run, step: int) -> int:
    """Size of the metrics when the checkpoint of a step was begun."""
    rows = rows_before(folder_of(run.checkpoints, step), run=run.id)
    return rows.bytes


def flip_a_digit(run: Run, *, after: int) -> None:
    content = run.metrics_file.read_bytes()
    at = content.index(b'"seconds": ', after) + len('"seconds": ')
    run.metrics_file.write_bytes(content[:at] + b"%d" % (9 - int(content[at : at + 1])) + content[at + 1 :])


HARMS: dict[str, tuple[Callable[[Run], object], int]] = {
    "removed": (lambda run: run.metrics_file.unlink(), 0),
    "emptied": (lambda run: run.metrics_file.write_text(""), 0),
    "halved": (lambda run: os.truncate(run.metrics_file, rows_at(run, FIRST) // 2), 0),
    "cut after the last": (lambda run: os.truncate(run.metrics_file, rows_at(run, LATE) + 1), LATE),
    "cut after a checkpoint": (lambda run: os.truncate(run.metrics_file, rows_at(run, LATE) - 1), EARLY),
    "a digit before checkpoints": (lambda run: flip_a_digit(run, after=0), 0),
    "a digit after checkpoints": (lambda run: flip_a_digit(run, after=rows_at(run, LATE)), LATE),
}
"""What happens to the metrics, and the step from which the run goes on."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An experiment of one run that is completed, and one of a run that is paused."""
    folder = tmp_path_factory.mktemp("trained")
    settings = [*ONE, f"train.steps={STEPS}", "train.eval_interval=2", "train.checkpoint_interval=2"]
    for name, until in (("completed", []), ("paused", ["--until", str(LATE)])):
        sweep(folder / name, *settings, "site.keep_checkpoints=9")
        with pytest.MonkeyPatch.context() as patch:
            launch_in_this_process(patch)
            succeeded("launch", folder / name, "--replay", *until)
    return {name: folder / name for name in ("completed", "paused")}


def comparable(run: Run) -> list[dict[str, object]]:
    rows = [row for row in plain(run) if row["kind"] != "start"]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("state", ["completed", "paused"])
@pytest.mark.parametrize("harm", HARMS)
def test_what_is_lost_is_said_by_all_and_repaired_by_the_hint(
    harm: str, state: str, trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_in_this_process(monkeypatch)
    folder = tmp_path / "e"
    shutil.copytree(trained[state], folder)
    (run,) = open_experiment(folder).runs
    (whole,) = open_experiment(trained["completed"]).runs
    change, step = HARMS[harm]
    change(run)
    harmed = run.metrics_file.read_bytes() if run.metrics_file.exists() else None
    # A run that is to go on anyway goes back by itself as far as it has to.
    damaged = state == "completed" or step == 0 or "digit" in harm
    (told,) = json.loads(succeeded("status", folder, "--json").output)
    (reported,) = json.loads(succeeded("report", folder, "--format", "json").output)
    assert {told["state"], reported["status"]} == {"damaged" if damaged else "paused"}
    assert (str(run.metrics_file) in told["reason"], reported["val_loss"] is None) == (damaged, True)
    launched = asyncpp("launch", folder, "--replay")
    assert launched.code == int(damaged), launched
    if damaged:
        assert told["reason"] in launched.errors
        (hint,) = re.findall(r"to repair it: (asyncpp .*)", launched.errors)
        repaired = succeeded(*shlex.split(hint)[1:], "--replay")
        assert f"is repaired: it resumes from step {step}" in repaired.errors
        if (kept := run.metrics_file.with_name("metrics.jsonl.damaged-1")).exists():
            assert kept.read_bytes() == harmed
        assert (run.folder / "checkpoints.damaged-1").exists() == (step == 0)
    (told,) = json.loads(succeeded("status", folder, "--json").output)
    (reported,) = json.loads(succeeded("report", folder, "--format", "json").output)
    assert {told["state"], reported["status"]} == {"completed"}
    starts = [json.loads(line) for line in run.metrics_file.read_text().splitlines() if '"start"' in line]
    assert starts[-1]["step"] == step
    assert comparable(run) == comparable(whole)


@pytest.mark.slow
def test_flipped_bytes_are_seen_or_change_no_number(trained: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained["completed"], tmp_path / "e"))
    [run], [whole] = open_experiment(folder).runs, cells_of(folder)
    chance = random.Random(0)
    attempt = run.attempts / "1"
    files = [run.metrics_file, run.config_file, run.status_file, attempt / "attempt.json"]
    files += [attempt / "outcome.json", folder / "experiment.json"]
    for file in files:
        content = file.read_bytes()
        # The end of the file holds what says that it is whole.
        places = [chance.randrange(len(content)) for _ in range(12)]
        places += [len(content) - chance.randrange(1, min(120, len(content))) for _ in range(4)]
        for place in places:
            byte = content[place] ^ (1 << chance.randrange(7))
            where = f"{file.name}, byte {place} of {len(content)}: {content[place]} became {byte}"
            file.write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
            if file.name == "experiment.json" and (ended := asyncpp("report", folder)).code == 2:
                assert str(file) in ended.errors, where
                continue
            [flipped] = cells_of(folder)
            if flipped == whole:
                continue
            if file.parent == attempt:
                # It holds what the run has cost; the other numbers stay.
                assert str(file) in "".join(asyncpp("report", folder).output.split()), where
                assert flipped["val_loss"] == whole["val_loss"], where
            else:
                assert flipped["status"] in ("damaged", "missing"), where
                assert (run.id in flipped["reason"], flipped["val_loss"]) == (True, None), where
        file.write_bytes(content)
    assert cells_of(folder) == [whole]
