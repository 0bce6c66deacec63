"""The time that runs are expected to take on this machine."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.command_line import ran, succeeded
from support.small_runs import small_config

from asyncpp_cli.planner import here
from asyncpp_cli.planner.costs.profile_costs import Measured, conditions
from asyncpp_cli.planner.here import seconds_here, together
from asyncpp_cli.sites.resources import Machine
from stages.config.run_config import RunConfig, changed

_TWO_CORES = Machine(cores=2, gpus=())


@pytest.fixture(autouse=True)
def _measured_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embedding and head take no time, forward and backward of a block 1 and 2 seconds, an update none."""

    def measured(config: RunConfig) -> Measured:
        free = dict.fromkeys(("forward", "backward", "input_half", "weight_half", "cheap"), 0.0)
        block = free | {"forward": 1.0, "backward": 2.0, "input_half": 1.0, "weight_half": 1.0}
        size = str(config.train.microbatch_size)
        of_parts = {"embedding": free, "block": block, "head": free}
        parts = {name: {"update": 0.0, "microbatch": {size: times}} for name, times in of_parts.items()}
        machine = {"device": "cpu", "threads": config.site.threads, "message_seconds": 0.0}
        return Measured(Path("here"), {"conditions": conditions(config), "parts": parts, **machine})

    monkeypatch.setattr(here, "_measured", lambda configs: [measured(config) for config in configs])
    monkeypatch.setattr(here, "_MEASURED", {})
    monkeypatch.setattr(here, "_MOST_FLOPS", 2e10)


def _config(**options: Any) -> RunConfig:
    return small_config("2bw", text=Path("text"), stages=2, microbatches=4, steps=10, **options)


def test_a_run_takes_its_start_its_steps_and_its_evaluations() -> None:
    config = _config(layers=2, eval_interval=5)
    # Without a bubble each rank takes 3 seconds for a micro-batch. Those of an evaluation take 2, which
    # the ranks share.
    [seconds] = seconds_here([config], machine=_TWO_CORES)
    assert seconds == pytest.approx(here._START_SECONDS + 10 * 4 * 3 + 2 * 2, rel=0.01)
    [synchronous] = seconds_here(
        [replace(config, schedule=replace(config.schedule, name="1f1b"))], machine=_TWO_CORES
    )
    assert synchronous == pytest.approx(here._START_SECONDS + 10 * 5 * 3 + 2 * 2, rel=0.01)
    # On one core two ranks take turns.
    [crowded] = seconds_here([config], machine=Machine(cores=1, gpus=()))
    assert crowded == pytest.approx(here._START_SECONDS + 2 * (seconds - here._START_SECONDS))


def test_runs_share_the_cores() -> None:
    config = _config()
    four = [config] * 4
    assert together(four, [10.0] * 4, machine=_TWO_CORES) == 40
    assert together(four, [10.0] * 4, machine=Machine(cores=4, gpus=())) == 20
    assert together(four, [10.0] * 4, machine=Machine(cores=64, gpus=())) == 10


@pytest.mark.parametrize("change", [{"compile": True}, {"microbatch_size": 10**9}])
def test_what_cannot_be_measured_quickly_is_unknown(change: dict[str, Any]) -> None:
    config = _config()
    config = replace(config, train=replace(config.train, **change))
    assert seconds_here([config], machine=_TWO_CORES) == [None]
    on_gpu = _config()
    on_gpu = changed(on_gpu, {"site.device": "auto"})
    assert seconds_here([on_gpu], machine=Machine(cores=2, gpus=("0",))) == [None]


@pytest.mark.slow
def test_the_parts_are_measured_in_a_process_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(here, "_MEASURED", {})
    succeeded("sweep", "quickstart", "--out", tmp_path / "e")
    [file, *_] = tmp_path.glob("e/runs/*/config.yaml")
    script = tmp_path / "mine.py"
    script.write_text(
        "from pathlib import Path\n"
        "from asyncpp_cli.planner.here import seconds_here\n"
        "from asyncpp_cli.runs.config_file import read_config\n"
        "from asyncpp_cli.sites.resources import Machine\n"
        "print('once')\n"
        f"config = read_config(Path({str(file)!r}))\n"
        "[seconds] = seconds_here([config], machine=Machine(cores=2, gpus=()))\n"
        "assert seconds > 3, seconds\n"
    )
    done = ran(sys.executable, script)
    assert (done.code, done.output) == (0, "once\n"), done.errors


@pytest.mark.slow
def test_what_measures_ends_without_the_process_that_asked_for_it(tmp_path: Path) -> None:
    succeeded("sweep", "quickstart", "--out", tmp_path / "e")
    [file, *_] = tmp_path.glob("e/runs/*/config.yaml")
    measure = [sys.executable, "-m", "asyncpp_cli.planner.costs.measure"]
    [times] = json.loads(ran(*measure, str(os.getpid()), file).output)
    assert times["parts"]
    # The number of no process: as if it had been killed, and another one were the parent.
    done = ran(*measure, "0", file)
    assert (done.code, done.output) == (1, "")
