"""The map of the best layouts: its points are those of `plan`, and its ratios those of the simulator."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.command_line import asyncpp, succeeded
from support.launches import started_process, wait_for
from support.planned import COSTS

from asyncpp_cli.planner.base_config import base_of
from asyncpp_cli.planner.costs.roofline import Roofline
from asyncpp_cli.planner.decision import decision_map
from asyncpp_cli.planner.layouts import CONSIDERED
from asyncpp_cli.planner.listing import KINDS, listed
from asyncpp_cli.planner.rank import best_first
from asyncpp_cli.planner.shared import Shared

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "gpus", "tokens", "limit"), [("135m", 2, 2**13, 75.0), ("360m", 4, 2**13, 7.0)]
)
def test_a_point_has_the_layouts_of_plan(model: str, gpus: int, tokens: int, limit: float) -> None:
    base = base_of(model, []).config
    settings = {"gpus": gpus, "tokens_per_step": tokens, "names": CONSIDERED, "limit_gb": limit}
    shared = Shared(COSTS)
    found = listed(base, shared, with_sharded=False, **settings).best
    fitting = [one for one in best_first(base, shared, **settings) if one.memory_gb <= limit]
    for number, kind in enumerate(KINDS[:2]):
        assert found[kind] == next(one for one in fitting if one.delay == number)
    slower = max(best.step.seconds for kind, best in found.items() if kind != KINDS[2])
    more = found.get(KINDS[2])
    assert more is None or more.step.seconds < slower


def test_the_readme_says_what_is_planned() -> None:
    text = " ".join((Path(__file__).parents[3] / "README.md").read_text().split())
    found = re.search(
        r"By that estimate, for (\w+) with Muon on (\d+) H100s and ([\d,]+) tokens per step, a delay of one "
        r"step pays if it costs fewer than (\d+) % more steps than the best synchronous choice takes; at "
        r"(\d+) Gbit/s, fewer than (\d+) %",
        text,
    )
    assert found is not None
    model, gpus, tokens, share, slow_gbit, slow_share = found.groups()
    base = base_of(model, ["optimizer=muon"]).config
    limit = COSTS.device.usable_gb
    slow = replace(COSTS.device, network_gbs=int(slow_gbit) / 8)
    for costs, expected in ((COSTS, share), (Roofline(slow), slow_share)):
        settings = {"gpus": int(gpus), "tokens_per_step": int(tokens.replace(",", "")), "limit_gb": limit}
        found = listed(base, Shared(costs), **settings, names=CONSIDERED, with_sharded=True)
        assert found.synchronous is not None
        saved = found.synchronous.step.seconds / found.best["delay 1"].step.seconds - 1
        assert round(100 * saved) == int(expected)


def test_several_processes_plan_the_same_map() -> None:
    base = base_of("360m", []).config
    settings = {"gpus": 8, "tokens_per_step": [2**14, 2**15], "costs": COSTS, "limit_gb": 20.0}
    alone, shared = (decision_map(base, **settings, processes=count) for count in (1, 2))
    assert len(alone) == 6
    assert alone == shared


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are read from Linux's /proc")
def test_processes_end_with_a_map_that_is_killed() -> None:
    command = [sys.executable, "-m", "asyncpp_cli", "plan", "7b", "--gpus", "64", "--map", "--json"]
    with started_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as planning:
        children = Path(f"/proc/{planning.pid}/task/{planning.pid}/children")
        # They plan; one that is still starting ends by itself.
        wait_for(lambda: any(_ticks(child) > 200 for child in children.read_text().split()), seconds=600)
        workers = children.read_text().split()
        planning.kill()
        planning.wait()
    wait_for(lambda: all(_ticks(worker) == 0 for worker in workers), seconds=60)


def _ticks(process: str) -> int:
    """Processor time of a process, hundredths of a second; 0 if it has ended."""
    try:
        state, *fields = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state == "Z" else int(fields[10]) + int(fields[11])


def test_the_command_prints_draws_and_writes(tmp_path: Path) -> None:
    command = ["plan", "135m", "--gpus", "4", "--map", "--tokens-per-step", "16384"]
    command += ["--schedule", "zb-v", "--schedule", "2bw"]
    picture = tmp_path / "map.svg"
    table = succeeded(*command, "--out", picture)
    assert "delay 1" in table.output
    assert picture.read_text().lstrip().startswith("<?xml")
    written = asyncpp(*command, "--json")
    points = json.loads(written.output)
    assert [point["gpus"] for point in points] == [2, 4]
    for point in points:
        assert point["synchronous"]["delay"] == 0
        assert point["delay 1"]["delay"] == 1
        ratio = point["synchronous"]["step_time"] / point["delay 1"]["step_time"]
        assert point["delay 1"]["ratio"] == pytest.approx(ratio)
        assert f" {ratio:.2f} " in table.output
        doubled = point["larger batch"]["tokens_per_second"] / point["synchronous"]["tokens_per_second"]
        assert point["larger batch"]["ratio"] == pytest.approx(doubled)
