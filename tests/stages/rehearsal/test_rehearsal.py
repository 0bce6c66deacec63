"""Ranks with fake tensors on a GPU that is not there: what is found, and that today's code has none of it."""

from __future__ import annotations

import copy
import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.command_line import refusal, succeeded
from support.small_runs import small_config, with_documents, with_experts
from torch import Tensor

import stages.model.runner
from asyncpp_cli.planner.base_config import base_of
from asyncpp_cli.planner.peak_memory import backward_bytes, update_bytes
from asyncpp_cli.planner.rehearsal import ComparedRank, rehearse
from optimizers import CORRECTIONS
from optimizers.catalogue import method_named
from stages.config.run_config import RunConfig, changed, chosen_correction
from stages.model import layers
from stages.model.decoder import RunBlock, make_block
from stages.model.runner import block_runner
from stages.rehearsal.compiled import compile_on
from stages.rehearsal.rank import Rehearsal, rehearse_rank
from stages.rehearsal.watch import Watch
from stages.shape.partition import cut_of, owned_members, stage_parameters
from stages.update.optimizer_step import StageUpdate

GB = 10**9


def _small(schedule: str = "2bw", *, compiled: bool = False, **settings: Any) -> RunConfig:
    config = small_config(schedule, **{"precision": "bfloat16", "layers": 2, "steps": 20} | settings)
    return changed(config, {"train.compile": compiled})


def _shipped(model: str, *changes: str) -> RunConfig:
    """A model that ships, on two stages."""
    layout = ["parallel.stages=2", "schedule.microbatches=2", "train.microbatch_size=1", "train.steps=20"]
    return base_of(model, [*layout, "train.compile=false", *changes]).config


SHALLOW = ("model.layers=2", "data.context=512")


def _rehearsed(config: RunConfig, *, rank: int = 0) -> Rehearsal:
    return rehearse_rank(config, rank=rank, data_rank=0, device="cuda")


def _faults(config: RunConfig) -> list[tuple[str, str, str]]:
    return [(fault.kind, fault.what, fault.where.split(":")[0]) for fault in _rehearsed(config).faults]


@pytest.fixture(scope="module")
def small() -> Rehearsal:
    """A rank of a small run, as it is."""
    return _rehearsed(_small())


@pytest.mark.parametrize(
    ("schedule", "settings"),
    [
        ("1f1b", {"recompute": "full"}),
        ("2bw", {"optimizer": "muon", "coefficient": 1.0, "recompute": "selective", "data": 2}),
        ("2bw-v", {"split": True, "layers": 4}),
        ("paci-v", {"data": 2, "layers": 4}),
        ("2bw", {"shard_head": True, "tied": True}),
        ("2bw", {"ema_decay": 0.9, "data": 2}),
        ("zero-bubble", {"documents": True, "precision": "float32", "recompute": "selective"}),
    ],
)
@pytest.mark.slow
def test_nothing_is_found_in_any_rank(schedule: str, settings: dict[str, Any]) -> None:
    for rank in range(2):
        found = _rehearsed(_small(schedule, **settings), rank=rank)
        assert not found.faults
        # It did what a run does: weights, gradients, a step, an evaluation and a checkpoint.
        assert all(
            found.peak[kind] for kind in ("weights", "master", "gradients", "optimizer", "activations")
        )
        assert bool(found.peak["correction"]) == ("ema_decay" in settings)
        assert found.flops["F"] > 0
        assert found.flops["evaluation"] > 0
        assert any(finding.phase == "checkpoint" for finding in found.findings)


@pytest.mark.slow
def test_attention_within_documents_runs_the_kernel_for_various_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With documents as long as sequences it multiplies as much as the kernel that it takes the place of."""
    plain, masked = _small(), with_documents(_small())
    called: Counter[str] = Counter()
    dispatched = Watch.__torch_dispatch__

    def counting(self: Watch, func: Any, *args: Any) -> Any:
        called[str(func)] += 1
        return dispatched(self, func, *args)

    monkeypatch.setattr(Watch, "__torch_dispatch__", counting)
    found = _rehearsed(masked, rank=1)
    forwards, backwards = (
        called[f"aten._flash_attention_{name}.default"] for name in ("forward", "backward")
    )
    assert forwards > backwards > 0
    assert found.flops == _rehearsed(plain, rank=1).flops
    assert not found.hot_waits
    with_padding = copy.deepcopy(masked)
    with_padding = changed(with_padding, {"model.head_dim": 6})  # the kernel takes multiples of 8
    assert not _rehearsed(with_padding).faults


def _kept(run_block: RunBlock, config: RunConfig) -> set[tuple[torch.dtype, tuple[int, ...]]]:
    """Types and shapes of what a block keeps for its backward, its parameters left out."""
    block = make_block(config.model, experts=config.model.experts > 0)
    for parameter in block.parameters():
        parameter.data = torch.zeros(parameter.shape, dtype=torch.bfloat16)
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.zeros(parameter.shape)
    x = torch.zeros(1, config.data.context, config.model.width, dtype=torch.bfloat16, requires_grad=True)
    rotation = torch.zeros(2, config.data.context, config.model.width // config.model.heads)
    biases = [torch.zeros(config.model.experts)] if config.model.experts else []
    own = {parameter.data_ptr() for parameter in block.parameters()}
    kept = set()

    def note(saved: Tensor) -> Tensor:
        if saved.data_ptr() not in own:
            kept.add((saved.dtype, tuple(saved.shape)))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        run_block(block, x, rotation, *biases)
    return kept


# torch's own use of what it has deprecated, met when the compiler is imported.
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.slow
def test_a_traced_block_keeps_what_a_compiled_one_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_experts(_small())
    run_block = block_runner(config.model, recompute="selective", compiled=True)
    compiled = _kept(run_block, config)
    assert compiled
    watch = Watch("cpu", wide=False, tokens=1)
    monkeypatch.setattr(stages.model.runner, "_compile", compile_on(watch))
    assert _kept(run_block, config) == compiled


@pytest.mark.parametrize(
    ("schedule", "settings", "experts"),
    [
        ("2bw", {"recompute": "selective"}, True),
        ("zero-bubble", {}, False),
    ],
)
@pytest.mark.slow
def test_compiled_blocks_are_rehearsed(schedule: str, settings: dict[str, Any], experts: bool) -> None:
    config = _small(schedule, compiled=True, **settings)
    found = _rehearsed(with_experts(config, expert_width=16) if experts else config, rank=1)
    assert not found.faults
    assert found.compiled
    assert found.flops["B"] + found.flops["I"] > found.flops["F"] > 0
    assert found.peak["activations"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "schedule", "split", "recompute"),
    [("10b-moe", "2bw", False, "none"), ("7b", "2bw-v", True, "selective")],
)
def test_a_compiled_rank_at_full_width_takes_no_more_than_planned(
    model: str, schedule: str, split: bool, recompute: str
) -> None:
    """What a block keeps is the compiler's choice; that of experts was half as much again as planned."""
    changes = (f"schedule={schedule}", "parallel.data=2", f"train.recompute={recompute}")
    config = _shipped(model, "model.layers=4", *changes)
    config = changed(config, {"train.compile": None, "schedule.split": split})
    [compared] = rehearse(config, device="cuda", ranks=[1])
    assert compared.found.compiled
    assert not compared.found.faults
    assert compared.difference is not None
    assert -0.15 < compared.difference < 0.05, list(compared.by_kind())


def test_a_cpu_tensor_in_the_update_is_found(small: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    def clip(self: StageUpdate, gradient: Any, *, squared: Tensor) -> None:
        for run in gradient.owned_runs:
            run.mul_(torch.ones(len(run)))

    assert not small.faults
    monkeypatch.setattr(StageUpdate, "clip", clip)
    [(kind, what, where)] = _faults(_small())
    assert kind == "device"
    assert "cpu" in what
    assert where.endswith("test_rehearsal.py")


def test_a_number_that_the_host_reads_in_a_forward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: layers.RMSNorm, x: Tensor) -> Tensor:
        scale = x.abs().max().item()
        return F.rms_norm(x + scale, (x.shape[-1],), self.weight, self.eps)

    monkeypatch.setattr(layers.RMSNorm, "forward", forward)
    found = _rehearsed(_small())
    in_forward = {fault: times for fault, times in found.hot_waits.items() if fault.phase == "F"}
    norms = 2 * len(cut_of(_small())[0].blocks)
    assert list(in_forward.values()) == [norms * found.microbatches]
    assert ".item()" in next(iter(in_forward)).what


def test_a_float64_leak_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return (F.silu(gate.double()) * up).to(gate.dtype)

    monkeypatch.setattr(layers, "_gated", gated)
    faults = _faults(_small())
    assert faults
    assert {kind for kind, _, _ in faults} == {"type"}
    assert "float64" in faults[0][1]


@pytest.mark.slow
def test_experts_that_a_kernel_refuses_make_the_host_wait() -> None:
    """Rows of grouped products must be a multiple of 16 bytes; other widths are a loop over experts."""
    config = with_experts(_small(), expert_width=16)
    assert not _rehearsed(config).faults
    config = changed(config, {"model.expert_width": 12})
    assert {fault.kind for fault in _rehearsed(config).hot_waits} == {"wait"}


def test_on_a_cpu_nothing_waits() -> None:
    found = rehearse_rank(_small(), rank=0, data_rank=0, device="cpu")
    assert not found.findings
    assert found.peak["weights"]


def test_torch_is_left_as_it_was() -> None:
    before = (torch.cuda.Stream, torch.cuda.Event, copy.copy(vars(torch.cuda)))
    _rehearsed(_small())
    assert (torch.cuda.Stream, torch.cuda.Event) == before[:2]
    assert vars(torch.cuda).keys() == before[2].keys()
    x = torch.ones(2, requires_grad=True)
    (x * 2).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]
    assert not x.is_cuda


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "schedule", "data", "rank"),
    [
        ("10b", "2bw", 16, 0),
        ("10b", "1f1b", 16, 3),
        ("7b", "2bw", 2, 0),
        ("10b-moe", "1f1b", 1, 3),
        ("1b-7b-moe", "paci-v", 2, 3),
        ("7b", "2bw-v", 1, 2),
    ],
)
def test_memory_at_full_width_is_the_plan_s(model: str, schedule: str, data: int, rank: int) -> None:
    """Two blocks per rank; benchmarks/results/rehearsed-ranks-2026-11-24.md has whole models."""
    changes = ("model.layers=8", "parallel.stages=4", "schedule.microbatches=4", f"parallel.data={data}")
    config = _shipped(model, f"schedule={schedule}", *changes)
    config = changed(
        config,
        {
            "train.recompute": "selective" if (model, rank) == ("7b", 0) else "none",
            "train.ema_decay": 0.999 if model == "7b" else None,
            "schedule.split": schedule == "2bw-v",
        },
    )
    [compared] = rehearse(config, device="cuda", ranks=[rank])
    assert not compared.found.faults
    assert compared.is_as_planned, list(compared.by_kind())
    if model == "10b":
        check_kinds(compared)


def check_kinds(compared: ComparedRank) -> None:
    """Each kind that a dense rank keeps is planned to the byte, and no update takes a gigabyte beside it."""
    planned, peak = compared.planned, compared.found.peak
    assert planned is not None
    for kind in ("weights", "master", "gradients", "reduction"):
        assert peak[kind] == planned[kind], kind
    # Step counters; and next to nothing that is of no kind, such as rotations.
    assert 0 <= peak["optimizer"] - planned["optimizer"] < 1e-5 * planned["optimizer"]
    assert peak["other"] < 0.01 * GB
    assert max(planned["reduction"], compared.found.temporaries["update"]) < GB


@pytest.mark.parametrize(
    ("planned", "difference", "as_planned"),
    [
        (60_000_000, 19 * 2**20, True),
        (60_000_000, 21 * 2**20, False),
        (60_000_000, -21 * 2**20, False),
        (10_000_000_000, 490_000_000, True),
        (10_000_000_000, 510_000_000, False),
    ],
)
def test_memory_may_differ_by_a_segment_or_a_twentieth(
    planned: int, difference: int, as_planned: bool, small: Rehearsal
) -> None:
    found = replace(small, peak=Counter(weights=planned + difference), compiled=False)
    compared = ComparedRank(number=0, found=found, planned=Counter(weights=planned), planned_flops=None)
    assert compared.is_as_planned is as_planned


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ["schedule=fsdp", "optimizer=adamw"],
        ["schedule=hsdp", "optimizer=muon"],
        ["schedule=fsdp", "optimizer=muon", "schedule.microbatches=8", "schedule.keep_weights=true"],
        ["schedule=fsdp", "optimizer=adamw", "schedule.microbatches=8", "schedule.reduce_each=true"],
    ],
)
def test_a_process_with_shards_takes_what_is_planned(changes: list[str]) -> None:
    config = _shipped("1b", *SHALLOW, "parallel.stages=4", "schedule.microbatches=4", *changes)
    [compared] = rehearse(config, device="cuda")
    assert not compared.found.faults
    assert compared.difference == pytest.approx(0, abs=0.03), list(compared.by_kind())
    assert compared.flops == pytest.approx(compared.planned_flops, rel=0.02)
    for kind in ("master", "optimizer"):
        assert compared.found.peak[kind] == pytest.approx(compared.planned[kind], rel=1e-3), kind


@pytest.mark.parametrize(("schedule", "rank"), [("fsdp", 0), ("1f1b", 1)])
def test_on_a_cpu_nothing_is_taken_for_a_gpu(schedule: str, rank: int) -> None:
    """Of a rank that computes the loss, whose gradient autograd makes itself."""
    config = changed(_small(schedule, precision="float32"), {"site.device": "cpu"})
    assert not rehearse_rank(config, rank=rank, data_rank=0, device="cpu").findings


@pytest.mark.slow
def test_the_command_writes_what_it_shows(tmp_path: Path) -> None:
    settings = ["model=nano", "parallel.stages=2", "optimizer.lr=1e-3", "train.precision=bfloat16"]
    settings += ["optimizer=adamw", "schedule.microbatches=2", "train.steps=8", "model.layers=4"]
    template = tmp_path / "cells.yaml"
    template.write_text("name: cells\nmatrix: {schedule: [1f1b, fsdp, 2bw-v], seed: [0, 1]}\n")
    folder, file = tmp_path / "cells", tmp_path / "ranks.csv"
    succeeded("sweep", template, *settings, "--out", folder)
    shown = succeeded("rehearse", folder, "--rank", "1", "--csv", file)
    with file.open(encoding="utf-8", newline="") as opened:
        rows = list(csv.DictReader(opened))
    # Seeds are alike; the last rank of a V has the middle of the model, and a process of fsdp all of it.
    assert {(row["schedule"], row["rank"], row["of_stages"]) for row in rows} == {
        ("1f1b", "1", "1"),
        ("fsdp", "1", "0"),
        ("2bw-v", "1", "1 2"),
    }
    for row in rows:
        kinds = {name.removeprefix("found_") for name in row if name.startswith("found_")}
        of_kinds = sum(int(row[f"found_{kind}"] or 0) for kind in kinds - {"bytes", "flops"})
        assert of_kinds == int(row["found_bytes"])
        assert f"{int(row['found_bytes']) / 1e9:.2f}" in shown.output
    assert "has ranks 0 to 1" in refusal("rehearse", next(folder.glob("runs/fsdp-*")), "--rank", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "name"),  # with the embedding, or with the head
    [
        *((0, name) for name in ("adamw", "mars", "muon", "soap")),
        *((1, name) for name in ("adan", "lion", "scion", "basis-rotation")),
    ],
)
def test_what_an_optimizers_step_takes_for_itself_is_the_plan_s(rank: int, name: str) -> None:
    """Rules that update lists: exactly, up to the numbers of a few norms. Batches of matrices: at most a
    fifth more is planned, since products with Gram matrices depend on the sides."""
    config = _shipped("135m", "schedule=1f1b", f"optimizer={name}", *SHALLOW)
    if "refresh_interval" in method_named(name).options:
        config = changed(config, {"optimizer": replace(config.optimizer, refresh_interval=1)})
    found = _rehearsed(config, rank=rank)
    assert not found.faults
    parameters = stage_parameters(config.model, cut_of(config)[rank])
    (owned,) = owned_members(parameters, data_ranks=1)
    planned = update_bytes(config, owned)
    norms = 0.01 * 4 * sum(parameter.size for parameter in owned)
    batched = method_named(name).main.batch != "0"
    assert found.temporaries["update"] - norms <= planned
    assert planned <= (1.2 if batched else 1.0) * found.temporaries["update"] + norms


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "settings", "precision"),
    [
        ("2bw", ["error_feedback.coefficient=1"], "bfloat16"),
        ("2bw", ["error_feedback.coefficient=1", "error_feedback.form=buffered"], "float32"),
        ("2bw", ["correction.name=weight-prediction"], "float32"),
        ("2bw", ["correction.name=weight-prediction", "correction.flavour=momentum"], "bfloat16"),
        ("2bw", ["correction.name=weight-prediction", "correction.flavour=adam-moments"], "bfloat16"),
        ("2bw", ["correction.name=lr-discount"], "float32"),
        ("2bw", ["correction.name=delay-compensation"], "bfloat16"),
        ("paci", ["correction.name=discrepancy"], "float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1].rpartition("=")[2],
)
def test_what_a_corrections_update_takes_for_itself_is_the_plan_s(
    schedule: str, settings: list[str], precision: str
) -> None:
    own = ("optimizer=adamw", "train.clip=stage", f"train.precision={precision}")
    config = _shipped("135m", f"schedule={schedule}", *SHALLOW, *own, *settings)
    found = _rehearsed(config, rank=0)
    assert not found.faults
    (owned,) = owned_members(stage_parameters(config.model, cut_of(config)[0]), data_ranks=1)
    planned = update_bytes(config, owned, mismatched=schedule == "paci")
    size = 4 * sum(parameter.size for parameter in owned)
    # What is kept is planned with the stage's own tensors.
    chosen = chosen_correction(config)
    kept = (CORRECTIONS[chosen[0]].values_per_parameter if chosen else 1) * size
    assert found.temporaries["update"] == pytest.approx(planned + kept, abs=0.01 * size)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_a_correction_takes_for_a_backward_is_the_plan_s(precision: str) -> None:
    own = ("optimizer=adamw", "train.clip=stage", f"train.precision={precision}")
    config = _shipped("135m", "schedule=paci", *SHALLOW, *own)
    config, cut = changed(config, {"correction.name": "discrepancy"}), cut_of(config)[0]
    found = _rehearsed(config, rank=0)
    assert not found.faults
    # Beside the velocities, which last.
    velocities = 4 * sum(parameter.size for parameter in stage_parameters(config.model, cut))
    planned = backward_bytes(config, cut, mismatched=True)
    assert backward_bytes(config, cut) < planned / 2, "the last stage, without a mismatch"
    assert found.temporaries["B"] - velocities == pytest.approx(planned, abs=0.01 * velocities)
