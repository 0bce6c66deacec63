"""Processes killed at random times: benchmarks/soak.py with a few kills, and what it would see."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from support.paths import ROOT

from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.run_folder import Run

SCRIPT = ROOT / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        return importlib.import_module("soak")


def rewrite(change: Callable[[list[str]], list[str]]) -> Callable[[Run], None]:
    def harm(run: Run) -> None:
        lines = run.metrics_file.read_text().splitlines(keepends=True)
        run.metrics_file.write_text("".join(change(lines)))

    return harm


def last_step(lines: list[str]) -> int:
    """Which line is the last step's: a kill after the last checkpoint leaves the last attempt without one."""
    return max(number for number, line in enumerate(lines) if json.loads(line)["kind"] == "step")


def without_a_row(lines: list[str]) -> list[str]:
    return [line for number, line in enumerate(lines) if number != last_step(lines)]


def with_a_doubled_row(lines: list[str]) -> list[str]:
    at = last_step(lines)
    return [*lines[: at + 1], *lines[at:]]


def flip(run: Run) -> None:
    file = next(run.checkpoints.glob("step-*/rank-0.safetensors"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def warn(run: Run) -> None:
    with (run.folder / "soak.log").open("a") as log:
        log.write("warning: checkpoint step-6 is not used: it is damaged\n")


HARMS = {
    "a missing row": (rewrite(without_a_row), "its rows differ"),
    "a doubled row": (rewrite(with_a_doubled_row), "its rows differ"),
    "another row": (rewrite(lambda lines: [*lines[:-1], lines[-1].replace('"end"', '"END"')]), "rows differ"),
    "another beginning": (
        rewrite(lambda lines: [lines[0].replace('"step": 0', '"step": 6', 1), *lines[1:]]),
        "began",
    ),
    "a flipped bit": (flip, "SHA-256 differs"),
    "a warning": (warn, "was damaged"),
}


@pytest.mark.timeout(500)
@pytest.mark.slow
def test_nothing_is_lost_in_kills_at_random_times(
    soak: ModuleType, tmp_path: Path, chance: random.Random
) -> None:
    options = f"--kills 6 --steps 48 --json --seed {chance.randrange(2**32)} --keep"
    done = subprocess.run(
        [sys.executable, SCRIPT, *options.split(), tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout)
    assert (figures["kills"], figures["problems"]) == (6, [])
    assert figures["runs"] >= 5

    run = next(Run(folder) for folder in sorted((tmp_path / "e" / "disturbed").iterdir()))
    (undisturbed,) = (whole for whole in open_experiment(tmp_path / "e").runs if run.id.endswith(whole.id))
    starts = [json.loads(line) for line in run.metrics_file.read_text().splitlines() if '"start"' in line]
    saved = {row["attempt"]: row["step"] for row in starts}
    whole = {file: file.read_bytes() for file in run.folder.rglob("*") if file.is_file()}
    assert soak.compare(run, undisturbed, saved, soak.Tally()) == []
    for name, (harm, words) in HARMS.items():
        harm(run)
        assert words in " ".join(soak.compare(run, undisturbed, saved, soak.Tally())), name
        for file, content in whole.items():
            file.write_bytes(content)
