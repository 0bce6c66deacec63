"""Memory under FSDP against what torch's own takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import fully_sharded
from support.fully_sharded import CASES, RANKS, config_of

from asyncpp_cli.planner.base_config import base_of
from asyncpp_cli.planner.sharding import Sharding, memory
from stages.config.run_config import changed

OUTSIDE = ("communicators", "allocator")
"""Kinds of memory that are no tensors."""


def planned(name: str) -> dict[str, int]:
    case = CASES[name]
    how = Sharding(ranks=RANKS, reshard=case.get("reshard", True), reduce_each=case.get("reduce_each", True))
    return memory(config_of(case), how)


def run(folder: Path, backend: str, ranks: int) -> dict[str, dict[str, int]]:
    """What the first rank measures."""
    command = [sys.executable, fully_sharded.__file__, backend]
    started = [subprocess.Popen([*command, str(rank), str(folder)]) for rank in range(ranks)]
    try:
        assert [process.wait(timeout=300) for process in started] == [0] * ranks
    finally:
        for process in started:
            process.kill()
    measured: dict[str, dict[str, int]] = json.loads((folder / f"{backend}-0.json").read_text())
    return measured


@pytest.mark.slow
def test_what_is_kept_is_planned_to_the_byte(tmp_path: Path) -> None:
    for name, taken in run(tmp_path, "gloo", RANKS).items():
        kinds = planned(name)
        assert taken["parameters"] == kinds["master"], name
        assert taken["gradients"] == kinds["master"], name
        assert taken["state"] == kinds["optimizer"], name


@pytest.mark.slow
def test_the_fullest_moment_is_planned(tmp_path: Path) -> None:
    for name, taken in run(tmp_path, "fake", 1).items():
        tensors = sum(size for kind, size in planned(name).items() if kind not in OUTSIDE)
        assert tensors / taken["peak"] == pytest.approx(1, abs=0.05), name


def test_shards_hold_a_share_of_what_one_rank_holds() -> None:
    config = base_of("10b", ["optimizer=muon"]).config
    config = changed(config, {"schedule.microbatches": 4})
    whole, shard = (memory(config, Sharding(ranks=ranks)) for ranks in (1, 64))
    for kind in ("master", "gradients"):
        assert shard[kind] == pytest.approx(whole[kind] / 64, rel=0.01)
    # A matrix is not cut, so one rank has more of them than another.
    assert whole["optimizer"] / 64 <= shard["optimizer"] <= 1.5 * whole["optimizer"] / 64
    kept = memory(config, Sharding(ranks=64, reshard=False, reduce_each=False))
    assert kept["weights"] >= 2 * whole["master"] / 4
    assert kept["gradients"] >= whole["master"]
