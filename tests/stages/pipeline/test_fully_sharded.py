"""Runs under `fsdp` and `hsdp` against `1f1b` with as many data ranks, which their replay is."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_runs import Rows, in_processes, replayed, small_config

from asyncpp_cli.planner.sharding import memory_of_run
from stages.checkpoint.export import write_weights
from stages.checkpoint.export_options import ExportFormat, Weights
from stages.checkpoint.saved_weights import newest_weights
from stages.comm.process import Process
from stages.config.run_config import RunConfig, changed
from stages.trainer import train

pytestmark = pytest.mark.slow

SAME_BITS: list[dict[str, Any]] = [
    {"optimizer": "adamw"},
    {"optimizer": "muon", "keep_weights": True, "vocab_size": 257},
    {"optimizer": "soap", "family": "qwen3"},
    {"optimizer": "muon", "family": "experts", "recompute": "full"},
    {"optimizer": "lion", "family": "experts"},
    {"optimizer": "muon", "family": "tied", "recompute": "selective"},
    {"optimizer": "muon", "ema_decay": 0.8, "documents": True},
    {"optimizer": "muon", "family": "mup"},
    {"precision": "bfloat16", "optimizer": "adamw", "family": "experts"},
    {"precision": "bfloat16", "optimizer": "muon", "recompute": "full"},
    {"optimizer": "mars", "precision": "float64"},
]


def config_of(case: dict[str, Any], *, processes: int, schedule: str = "fsdp") -> RunConfig:
    """A run that is not clipped: the norm of rows is rounded otherwise than that of a matrix.

    A process's part of a vector fills registers: the fused AdamW of a CPU rounds the rest otherwise.
    """
    settings = {"clip": "none", "steps": 3, "eval_interval": 2, "microbatches": 2 * processes} | case
    kept = {key: settings.pop(key, False) for key in ("keep_weights", "reduce_each")}
    family = settings.pop("family", "llama")
    config = small_config(schedule, stages=processes, family=family, **settings)
    if family != "mup":
        config = replace(config, model=replace(config.model, width=64))
    if family == "qwen3":  # whose norms have a head's width
        config = replace(config, model=replace(config.model, heads=1, kv_heads=1))
    return replace(config, schedule=replace(config.schedule, **kept))


def trained(process: Process, given: tuple[RunConfig, Path | None, int | None]) -> dict[str, Any]:
    config, folder, until = given
    rows = Rows()
    result = train(config, process=process, recorder=rows, checkpoints=folder, until=until)
    weights = {name: tensor.double().tolist() for name, tensor in result.weights.items()}
    return {"rows": rows.rows, "weights": weights}


def in_shards(configs: list[RunConfig], *, processes: int) -> list[list[dict[str, Any]]]:
    """What processes have of each run; the first one has its rows."""
    given = [(config, None, None) for config in configs]
    return [list(found) for found in zip(*in_processes(trained, given, size=processes), strict=True)]


def numbers(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    names = ("kind", "step", "train_loss", "grad_norm", "lr", "val_loss", "val_loss_ema", "weights_sha256")
    return [tuple(row.get(name) for name in names) for row in rows if row["kind"] in ("step", "eval", "end")]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_weights_and_losses_have_the_bits_of_the_replay(processes: int) -> None:
    cases = {1: SAME_BITS[1:4], 2: SAME_BITS, 4: SAME_BITS[::2]}[processes]
    configs = [config_of(case, processes=processes) for case in cases]
    for case, config, found in zip(cases, configs, in_shards(configs, processes=processes), strict=True):
        assert numbers(found[0]["rows"]) == numbers(replayed(config).rows), case


def drawn(chance: random.Random, *, processes: int) -> RunConfig:
    schedule = "hsdp" if processes == 4 and chance.random() < 0.4 else "fsdp"
    case = {
        "precision": "float64",
        "clip": "global",
        "clip_norm": chance.choice([0.05, 1.0]),
        "optimizer": chance.choice(["adamw", "muon", "adan", "qhadamw", "normuon", "scion"]),
        "family": chance.choice(["llama", "qwen3", "experts", "tied", "mup"]),
        "recompute": chance.choice(["none", "full", "selective"]),
        "microbatches": processes * chance.choice([1, 2, 3]),
        "vocab_size": chance.choice([256, 257]),
        "ema_decay": chance.choice([None, 0.9]),
        "keep_weights": chance.random() < 0.5,
        "reduce_each": chance.random() < 0.5,
        "seed": chance.randrange(1000),
    }
    if case["family"] == "mup":
        case["optimizer"] = chance.choice(["adamw", "muon"])
    return config_of(case, processes=processes, schedule=schedule)


@pytest.mark.parametrize("processes", [2, 4])
def test_in_float64_weights_are_those_of_1f1b_to_1e_12(processes: int) -> None:
    """The norm that gradients are clipped by is summed in another order, and under `hsdp` the gradients.

    Without SOAP, whose bases make more of the last digit; its bits are compared above.
    """
    chance = random.Random(f"{processes} 0")
    configs = [drawn(chance, processes=processes) for _ in range(10)]
    for config, found in zip(configs, in_shards(configs, processes=processes), strict=True):
        reference = replayed(replace(config, schedule=replace(config.schedule, name="fsdp"))).result.weights
        weights = {name: values for each in found for name, values in each["weights"].items()}
        assert weights.keys() == reference.keys()
        for name, tensor in reference.items():
            assert float((tensor.new_tensor(weights[name]) - tensor).abs().max()) < 1e-12, (config, name)


def test_clipping_in_float32_differs_in_the_last_digit_of_the_norm() -> None:
    """A norm of float32 values is rounded once per tensor, here of rows: by 2^-23 relative to each."""
    config = config_of({"clip": "global", "clip_norm": 0.05}, processes=2)
    [found] = in_shards([config], processes=2)
    ours = [row for row in found[0]["rows"] if row["kind"] == "step"]
    for row, other in zip(ours, replayed(config).of_kind("step"), strict=True):
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=2**-22)
        assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("schedule", "case"),
    [
        ("fsdp", {"optimizer": "muon", "family": "experts", "ema_decay": 0.8}),
        ("hsdp", {"optimizer": "adamw", "ema_decay": 0.8}),
        ("fsdp", {"optimizer": "adamw", "precision": "bfloat16"}),
    ],
)
def test_a_resumed_run_has_the_same_bits_and_checkpoints_go_on_elsewhere(
    schedule: str, case: dict[str, Any], tmp_path: Path
) -> None:
    """In `fsdp`, in `hsdp`, as data ranks of `1f1b`, and as its stages; and from there under shards."""
    processes = 4 if schedule == "hsdp" else 2
    config = config_of(case | {"microbatches": 4, "steps": 5}, processes=processes, schedule=schedule)
    config = replace(config, train=replace(config.train, checkpoint_interval=2))
    folders = [tmp_path / name for name in ("undisturbed", "again", "stopped")]
    plan = [(config, folders[0], None), (config, folders[1], None), (config, folders[2], 2)]
    results = in_processes(trained, plan, size=processes)
    whole, again, _ = (found["rows"] for found in results[0])
    assert numbers(whole) == numbers(again)
    weights = {name: values for found in results for name, values in found[0]["weights"].items()}
    check_export(config, folders[0], weights, tmp_path / "exported")
    for name in ("replay", "stages", "other"):
        shutil.copytree(folders[2], tmp_path / name)
    other = replace(config, schedule=replace(config.schedule, name="fsdp"))
    resumed, elsewhere = zip(
        *in_processes(
            trained, [(config, folders[2], None), (other, tmp_path / "other", None)], size=processes
        ),
        strict=True,
    )
    last = [row["weights_sha256"] for row in (whole[-1], resumed[0]["rows"][-1], elsewhere[0]["rows"][-1])]
    assert last[0] == last[1]
    assert schedule == "hsdp" or last[0] == last[2]
    replayed_on = replayed(other, checkpoints=tmp_path / "replay")
    assert schedule == "hsdp" or replayed_on.digest == last[0]
    staged = replace(config, schedule=replace(config.schedule, name="1f1b"))
    losses = replayed(staged, checkpoints=tmp_path / "stages").of_kind("step")
    ours = [row for row in whole if row["kind"] == "step" and row["step"] > 2]
    rel = 2e-3 if "precision" in case else 1e-5
    assert [row["train_loss"] for row in losses] == pytest.approx(
        [row["train_loss"] for row in ours], rel=rel
    )
    # What a pipeline saved goes on in shards.
    back = tmp_path / "back"
    replayed(staged, checkpoints=back, until=2)
    [shards], *_ = in_processes(trained, [(config, back, None)], size=processes)
    there = [row["train_loss"] for row in shards["rows"] if row["kind"] == "step"]
    assert there == pytest.approx([row["train_loss"] for row in losses], rel=rel)


def check_export(config: RunConfig, checkpoints: Path, weights: dict[str, Any], out: Path) -> None:
    """What shards saved is exported for transformers, and a pipeline that starts there has their weights."""
    out.mkdir()
    saved = newest_weights(checkpoints, config)
    write_weights(saved, config, out, format=ExportFormat.HF, weights=Weights.MASTER)
    model = replace(config.model, init=str(out))
    if model.experts:
        model = replace(model, balance="none", balance_rate=None)
    started = replace(
        config,
        model=model,
        schedule=replace(config.schedule, name="1f1b"),
        optimizer=replace(config.optimizer, lr=1e-30, weight_decay=0.0),
        train=replace(config.train, steps=1, precision="float32"),
    )
    found = replayed(started).result.weights
    assert found.keys() == weights.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.double(), torch.tensor(weights[name], dtype=torch.float64)), name


def test_waits_for_exchanges_are_measured_and_memory_is_as_planned() -> None:
    """Of a rank that has fewer rows, or owns smaller matrices, less: these shapes divide."""
    settings = {"steps": 6, "eval_interval": 6, "optimizer": "muon", "microbatches": 2}
    config = config_of(settings, processes=2)
    [found] = in_shards([config], processes=2)
    [segment] = [row for row in found[0]["rows"] if row["kind"] == "segment"]
    assert len(segment["busy"]) == 1
    assert 0 < segment["busy"][0] < 1
    planned = memory_of_run(changed(config, {"site.device": "cpu"}))
    for kind in ("gradients", "optimizer"):
        assert segment["memory"][kind] == [planned[kind]], kind
    # What a process holds of matrices with an owner is planned as master, too.
    held = segment["memory"]["weights"][0] + segment["memory"]["master"][0]
    assert held == planned["master"]
