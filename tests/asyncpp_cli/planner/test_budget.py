"""The budget of a block's time: the planner's own times, the page that shows them, and a benchmark of it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.files import ROOT

from asyncpp_cli.planner.base_config import base_of
from asyncpp_cli.planner.budget import ADDING, BLOCK, HEAD, UPDATE, budget, utilisation
from asyncpp_cli.planner.devices import find_device
from asyncpp_cli.planner.roofline import Roofline
from stages.model.families.catalogue import describe

H100 = Roofline(find_device("h100", key="device"))


def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("made", ROOT / "docs" / "make_performance.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_page_is_current() -> None:
    made = page()
    assert made.FILE.read_text(encoding="utf-8") == made.text(), "run: make docs"


@pytest.mark.parametrize("model", ["1b", "7b", "qwen3-0.6b", "nano"])
def test_the_parts_are_the_planners_times(model: str) -> None:
    config = base_of(model, ["optimizer=muon", "train.microbatch_size=4"]).config
    lines = {line.part: line for line in budget(config, H100)}
    planned, spec = H100.parts(config), describe(config.model)
    assert lines[BLOCK].forward == pytest.approx(planned.blocks[0].forward, rel=1e-12)
    assert lines[BLOCK].backward == pytest.approx(planned.blocks[0].backward, rel=1e-12)
    assert (lines[HEAD].forward, lines[HEAD].backward) == (planned.head.forward, planned.head.backward)
    assert lines[UPDATE].backward * config.schedule.microbatches == H100.update(
        config, spec.blocks[0].parameters
    )
    # Six for each value of a matrix and each token, and causal attention: 3.5 of its forward.
    tokens = 4 * config.data.context
    attention = 7 * tokens * spec.blocks[0].attention * config.data.context
    assert lines[BLOCK].flops == pytest.approx(6 * tokens * spec.blocks[0].multiply_adds + attention)


def test_utilisation_is_the_arithmetic_over_the_time() -> None:
    config = base_of("7b", ["optimizer=muon", "schedule.microbatches=16"]).config
    lines = {line.part: line for line in budget(config, H100)}
    of_block = lines[BLOCK]
    seconds = of_block.forward + of_block.backward + lines[ADDING].backward + lines[UPDATE].backward
    flops = describe(config.model).blocks[0].training_flops(context=4096)
    tokens = config.train.microbatch_size * 4096
    block, _ = utilisation(config, H100, recompute="none")
    assert block == pytest.approx(tokens * flops / (989.4e12 * seconds))
    again, _ = utilisation(config, H100, recompute="full")
    assert again == pytest.approx(tokens * flops / (989.4e12 * (seconds + of_block.forward)))
    both = [utilisation(config, H100, recompute=way) for way in ("full", "selective", "none")]
    assert both == sorted(both)


@pytest.mark.slow
def test_a_benchmark_measures_the_same_parts_and_the_page_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = [sys.executable, ROOT / "benchmarks" / "big_stage.py", "--device", "cpu", "--parts"]
    small = ["--model", "nano", "--context", "16", "--repeats", "1", "--out", tmp_path]
    ended = subprocess.run([*script, *small], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    config = base_of("nano", []).config
    parts = [line.part for line in budget(config, H100)]
    rows = [row for row in ended.stdout.splitlines() if row.startswith("| ")][1:]
    assert [row.split("|")[1].strip() for row in rows] == parts
    made = page()
    (tmp_path / "parts-cpu-nano.json").rename(tmp_path / "parts-h100-7b.json")
    monkeypatch.setattr(made, "MEASURED", tmp_path)
    of_1b, of_7b = made.text().split("## 7b")
    assert (of_1b.count("| measured |"), of_7b.count("| measured |")) == (0, len(parts))
