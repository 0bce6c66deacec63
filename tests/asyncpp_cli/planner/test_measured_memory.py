"""What the planner says of memory against what one H100 took (benchmarks/results/h100-2026-11-26.md)."""

import csv
import re
from pathlib import Path

import pytest

from asyncpp_cli.planner.base_config import base_of
from asyncpp_cli.planner.costs.devices import CONTEXT_GB, find_device
from asyncpp_cli.planner.costs.roofline import Roofline
from asyncpp_cli.planner.estimate import estimate
from asyncpp_cli.planner.layouts import layout
from asyncpp_cli.planner.peak_memory import NCCL_BUFFER, communicator_bytes
from asyncpp_cli.planner.planned_memory import OF_THE_DEVICE

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
NAME = "h100-2026-11-26"
MICROBATCHES = {"7b": 16, "10b-moe": 16, "360m": 4}


def measured() -> list[dict[str, str]]:
    with (RESULTS / f"{NAME}.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["memory_gb"]]


@pytest.mark.parametrize("row", measured(), ids=lambda row: row["model"])
def test_a_stage_took_what_is_planned(row: dict[str, str]) -> None:
    stage, _, stages = (0, "", 1) if row["stage"] == "all" else row["stage"].partition(" of ")
    base = base_of(row["model"], [f"optimizer={row['optimizer']}"]).config
    config = layout(
        base,
        row["schedule"],
        stages=int(stages),
        data=1,
        microbatches=MICROBATCHES[row["model"]],
        size=int(row["microbatch_tokens"]) // base.data.context,
        recompute=row["recompute"],
    )
    config.train.compile, config.site.device = True, "cuda"
    planned = estimate(config, Roofline(find_device("h100", key="device")), limit_gb=None)
    kinds = planned.memory[planned.rank_of_stage[int(stage)]]
    tensors = sum(size for kind, size in kinds.items() if kind not in OF_THE_DEVICE) / 1e9
    assert 1.0 <= tensors / float(row["memory_gb"]) <= 1.12


def test_context_and_communicators_take_what_they_took() -> None:
    """Communicators of one rank, which have no buffers of a peer."""
    found = re.search(
        r"context took (\d+) MB, the first communicator (\d+) MB\s+more, a second (\d+) MB, a link (\d+) MB",
        (RESULTS / f"{NAME}.md").read_text(),
    )
    assert found is not None
    context, first, second, link = map(int, found.groups())
    assert pytest.approx(context / 1000, abs=0.005) == CONTEXT_GB

    def without_peers(*, neighbours: int = 0, stages: int, data: int = 1) -> float:
        buffers = 2 * neighbours * 4 + 2 * 32 * ((stages > 1) + (data > 1)) + 2 * (data - 1)
        taken = communicator_bytes(neighbours=neighbours, stages=stages, data=data)
        return (taken - buffers * NCCL_BUFFER) / 1e6

    assert communicator_bytes(neighbours=0, stages=1, data=1) == 0
    assert without_peers(stages=2) == pytest.approx(first, abs=1)
    assert without_peers(stages=1, data=4) == pytest.approx(first, abs=1)
    assert without_peers(stages=2, data=4) == pytest.approx(first + second, abs=1)
    assert without_peers(stages=8, neighbours=2) == pytest.approx(first + 4 * link, abs=4)
