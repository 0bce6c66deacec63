"""What only a GPU can show. One of them does: several ranks share it, and send through the host's memory.

Without one these tests are skipped; what they rest on is tested beside them with tensors of the host
(`test_clock`, `test_host_waits`, `test_through_host`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.small_runs import in_processes, replayed, small_config, trained_here

from stages.comm.process import Process
from stages.config.run_config import RunConfig
from stages.model.compiler import missing_for_compile
from stages.model.gradients.weight_gradient import add_product, add_rows
from stages.model.grouped import add_stack_gradient
from stages.update.clock import EventClock, clock_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here"),
]


def test_a_gpu_agrees_with_a_cpu() -> None:
    losses = []
    for device in ("cpu", "cuda"):
        config = small_config("2bw", precision="float64", coefficient=1.0, **{"site.device": device})
        losses.append([row["train_loss"] for row in replayed(config).of_kind("step")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


@pytest.mark.skipif(missing_for_compile(device="cuda") is not None, reason="nothing compiles here")
def test_one_rank_computes_compiled_and_recomputed_blocks_in_bf16() -> None:
    config = small_config(
        "1f1b", stages=1, precision="bfloat16", recompute="full", compile=True, steps=8, lr=1e-2
    )
    rows = replayed(config)
    losses = [row["train_loss"] for row in rows.of_kind("step")]
    assert losses[-1] < losses[0]
    memory = rows.of_kind("segment")[0]["memory"]
    assert 0 < memory["device_peak"][0] <= memory["device_reserved"][0]
    assert memory["device_retries"] == [0]
    assert rows.digest == replayed(config).digest


@pytest.mark.parametrize("case", ["matrix", "rows", "stack"])
def test_gradients_of_bf16_weights_are_added_in_float32(case: str) -> None:
    """Those of stacks are rounded, by rule."""
    generator = torch.Generator().manual_seed(0)
    gradient, given = (torch.randn(512, 64, generator=generator).bfloat16() for _ in range(2))
    numbers = torch.arange(512) % 5
    ends = torch.tensor([0, 128, 512], dtype=torch.int32)
    shapes = {"matrix": (64, 64), "rows": (5, 64), "stack": (3, 64, 64)}
    totals = []
    for dtype, device in ((torch.float64, "cpu"), (torch.float32, "cuda")):
        total = torch.zeros(shapes[case], dtype=dtype, device=device)
        narrow = torch.float64 if device == "cpu" else torch.bfloat16
        left, right = (factor.to(device=device, dtype=narrow) for factor in (gradient, given))
        for _ in range(2):
            if case == "matrix":
                add_product(total, left, right)
            elif case == "rows":
                add_rows(total, left, numbers.to(device))
            else:
                add_stack_gradient(total, left, right, ends.to(device))
        totals.append(total.double().cpu())
    bound = 2**-8 if case == "stack" else 1e-5
    assert float((totals[1] - totals[0]).norm() / totals[0].norm()) < bound


def train_on_the_gpu(process: Process, config: RunConfig) -> list[dict[str, Any]]:
    # NCCL takes over where each process has a GPU of its own.
    assert process.device.type == "cuda"
    assert process.host_staged == (torch.cuda.device_count() < process.size)
    return trained_here(process, config).rows


LAYOUTS: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "two ranks": (
        2,
        [
            {"schedule": "2bw", "microbatches": 4, "precision": "bfloat16", "recompute": "full"},
            {"schedule": "paci", "microbatches": 4},
            {"schedule": "2bw", "stages": 1, "data": 2},
            {"schedule": "2bw-v", "microbatches": 4},
            {"schedule": "2bw", "microbatches": 4, "shard_head": True},
            {"schedule": "zb-v", "microbatches": 4, "shard_head": True, "tied": True},
            {"schedule": "pipedream", "update_interval": 1},
            {"schedule": "fsdp", "optimizer": "muon", "clip": "none"},
        ],
    ),
    "four ranks": (
        4,
        [
            {"schedule": "2bw", "data": 2, "microbatches": 4},
            {"schedule": "1f1b", "data": 2, "microbatches": 4},
            {"schedule": "2bw", "stages": 4, "microbatches": 8, "shard_head": True},
            {
                "schedule": "2bw-v",
                "stages": 4,
                "microbatches": 8,
                "delay": 2,
                "shard_head": True,
                "tied": True,
            },
        ],
    ),
}
"""Processes, and settings of `small_config`."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_on_gpus_are_their_replay_and_are_measured(layout: str) -> None:
    size, settings = LAYOUTS[layout]
    configs = [small_config(**each) for each in settings]
    by_rank = in_processes(train_on_the_gpu, configs, size=size)
    for config, *of_ranks in zip(configs, *by_rank, strict=True):
        (written,) = [rows for rows in of_ranks if rows]
        assert written[-1]["weights_sha256"] == replayed(config).digest
        segment = next(row for row in written if row["kind"] == "segment")
        # Under shards torch's streams wait, which is not measured.
        shares = [None] if config.schedule.name == "fsdp" else segment["busy"]
        assert shares == segment["busy"]
        assert all(share is None or 0 < share <= 1 for share in shares)
        assert all(seconds > 0 for of_stages in segment["action_seconds"].values() for seconds in of_stages)


def test_events_tell_what_the_device_did() -> None:
    device = torch.device("cuda", 0)
    clock = clock_of(device)
    assert isinstance(clock, EventClock)
    matrix, seconds = torch.randn(2048, 2048, device=device), list[float]()
    clock.begin()
    for count in (1, 200):
        start = clock.mark()
        for _ in range(count):
            torch.mm(matrix, matrix)
        clock.measure(start, lambda began, ended: seconds.append(ended - began))
    clock.finish()
    assert len(seconds) == 2
    assert 0 < seconds[0] < seconds[1]
