"""What the planner says against what one H100 took (benchmarks/results/h100-2026-11-26.md)."""

import csv
import re

import pytest
from support.files import ROOT
from support.planned import COSTS, layout_of

from asyncpp_cli.planner.base_config import base_of
from asyncpp_cli.planner.costs.devices import CONTEXT_GB
from asyncpp_cli.planner.estimate import estimate
from asyncpp_cli.planner.memory import OF_THE_DEVICE
from asyncpp_cli.planner.peak_memory import NCCL_BUFFER, communicator_bytes
from asyncpp_cli.planner.shared import Shared, own_cut_of
from schedules.messages import RankLinks
from stages.config.run_config import RunConfig, changed

RESULTS = ROOT / "benchmarks" / "results"
NAME = "h100-2026-11-26"
MICROBATCHES = {"7b": 16, "10b-moe": 16, "360m": 4}


def measured() -> list[dict[str, str]]:
    with (RESULTS / f"{NAME}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def run_of(row: dict[str, str]) -> tuple[RunConfig, int]:
    """The run of a row, and its stage."""
    stage, _, stages = (0, "", 1) if row["stage"] == "all" else row["stage"].partition(" of ")
    optimizer = f"optimizer={row['optimizer']}"
    size = int(row["microbatch_tokens"]) // base_of(row["model"], []).config.data.context
    sizes = {"stages": int(stages), "microbatches": MICROBATCHES[row["model"]], "size": size}
    config = layout_of(row["model"], row["schedule"], optimizer, **sizes, recompute=row["recompute"])
    config = changed(config, {"train.compile": True, "site.device": "cuda"})
    return config, int(stage)


@pytest.mark.parametrize("row", [row for row in measured() if row["memory_gb"]], ids=lambda row: row["model"])
def test_a_stage_took_what_is_planned(row: dict[str, str]) -> None:
    config, stage = run_of(row)
    planned = estimate(config, COSTS, limit_gb=None)
    kinds = planned.memory[planned.rank_of_stage[stage]]
    tensors = sum(size for kind, size in kinds.items() if kind not in OF_THE_DEVICE) / 1e9
    assert 1.0 <= tensors / float(row["memory_gb"]) <= 1.12


def test_a_stage_measured_alone_is_as_fast_as_its_kernels_are_planned() -> None:
    """Stages of a 7b, of whose time 240 of 2,200 ms added zeros that are not there any more."""
    rows = [row for row in measured() if row["model"] == "7b"]
    assert len(rows) == 3
    for row in rows:
        config, stage = run_of(row)
        times = Shared(COSTS).times(config, own_cut_of(config))
        seconds = 16 * (times.forward[stage] + times.backward[stage]) + times.update[stage]
        without_zeros = float(row["tokens_per_second"]) / (1 - 240 / 2200)
        speed = 16 * int(row["microbatch_tokens"]) / seconds
        assert speed / without_zeros == pytest.approx(1, abs=0.06)


def test_context_and_communicators_take_what_they_took() -> None:
    """Communicators of one rank, which have no buffers of a peer."""
    found = re.search(
        r"context took (\d+) MB, the first communicator (\d+) MB\s+more, a second (\d+) MB, a link (\d+) MB",
        (RESULTS / f"{NAME}.md").read_text(),
    )
    context, first, second, link = map(int, found.groups())
    assert pytest.approx(context / 1000, abs=0.005) == CONTEXT_GB

    def without_peers(*, neighbours: int = 0, stages: int, data: int = 1) -> float:
        buffers = 2 * neighbours * 4 + 2 * 32 * ((stages > 1) + (data > 1)) + 2 * (data - 1)
        links = RankLinks(2 * neighbours, 2 * neighbours)
        taken = communicator_bytes(links, stages=stages, data=data)
        return (taken - buffers * NCCL_BUFFER) / 1e6

    assert communicator_bytes(RankLinks(0, 0), stages=1, data=1) == 0
    assert without_peers(stages=2) == pytest.approx(first, abs=1)
    assert without_peers(stages=1, data=4) == pytest.approx(first, abs=1)
    assert without_peers(stages=2, data=4) == pytest.approx(first + second, abs=1)
    assert without_peers(stages=8, neighbours=2) == pytest.approx(first + 4 * link, abs=4)
