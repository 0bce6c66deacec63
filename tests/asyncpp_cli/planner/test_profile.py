"""`asyncpp plan --measure` and what `plan` makes of its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.command_line import asyncpp, refusal, succeeded

MODEL = "{layers: 4, width: 32, heads: 4, kv_heads: 2, mlp_width: 48, vocab_size: 300}"
COMMON = ("data.context=16", "train.precision=float32", "site.device=cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "small.yaml"
    file.write_text(MODEL)
    return file


@pytest.fixture(scope="module")
def measured(model: Path) -> Path:
    file = model.parent / "profile.json"
    sizes = ("--microbatch-size", "1", "--microbatch-size", "4")
    words = ("--schedule", "1f1b", "--measure", file, *sizes, "--repeats", "3")
    ended = succeeded("plan", model, *COMMON, *words)
    assert "a block takes" in ended.errors
    return file


def planned(model: Path, file: Path, *arguments: str) -> list[dict[str, Any]]:
    words = (*COMMON, "--profile", file, "--memory", "1", *arguments, "--json")
    return json.loads(succeeded("plan", model, *words).output)


@pytest.mark.slow
def test_every_part_is_measured_for_every_size(measured: Path) -> None:
    content = json.loads(measured.read_text())
    assert list(content["parts"]) == ["embedding", "block", "head"]
    for part in content["parts"].values():
        assert part["update"] > 0
        assert list(part["microbatch"]) == ["1", "4"]
        for times in part["microbatch"].values():
            assert set(times) == {"forward", "backward", "input_half", "weight_half", "cheap"}
            assert times["cheap"] >= 0
            assert all(seconds > 0 for name, seconds in times.items() if name != "cheap")
    assert content["conditions"]["model"]["width"] == 32


def by_hand(measured: Path, **changes: Any) -> Path:
    """The file with other times: 3 + 4 * 12 + 21 seconds for a micro-batch, and 60 for an update."""
    parts = {
        "embedding": {"forward": 1.0, "backward": 2.0, "input_half": 0.5, "weight_half": 2.0, "cheap": 0.0},
        "block": {"forward": 3.0, "backward": 9.0, "input_half": 4.5, "weight_half": 5.5, "cheap": 0.5},
        "head": {"forward": 6.0, "backward": 15.0, "input_half": 7.0, "weight_half": 9.0, "cheap": 0.0},
    }
    content = json.loads(measured.read_text()) | changes
    for name, times in parts.items():
        doubled = {key: 2 * seconds for key, seconds in times.items()}
        content["parts"][name] = {"microbatch": {"1": times, "2": doubled}, "update": 10.0}
    file = measured.with_name("by-hand.json")
    file.write_text(json.dumps(content))
    return file


def test_plans_are_made_of_the_measured_times(model: Path, measured: Path) -> None:
    """For one stage: it computes everything, one micro-batch after another."""
    file = by_hand(measured)
    found = planned(model, file, "--gpus", "1", "--tokens-per-step", str(16 * 4))
    times_of = {(one["microbatch_size"], one["recompute"]): one["step_time"] for one in found}
    update = 10 + 4 * 10 + 10
    once = 3 + 4 * 12 + 21
    for size in (1, 2, 4):  # 4 was not measured: twice as long as 2
        assert times_of[size, "none"] == pytest.approx(4 * once + update)
        assert times_of[size, "selective"] == pytest.approx(4 * (once + 4 * 0.5) + update)
        assert times_of[size, "full"] == pytest.approx(4 * (once + 4 * 3) + update)
    two = planned(model, file, "--gpus", "2", "--tokens-per-step", str(16 * 4), "--schedule", "2bw")
    keys = ("stages", "microbatch_size", "recompute", "shard_head")
    alone = next(one for one in two if tuple(one[key] for key in keys) == (2, 1, "none", False))
    # 2bw is as fast as its slowest stage: two blocks and the head.
    assert alone["cut"] == [3, 1]
    assert alone["step_time"] == pytest.approx(4 * (3 + 3 * 12) + 40)


def test_hours_on_cpus_are_those_of_all_cores(model: Path, measured: Path) -> None:
    arguments = ("--gpus", "1", "--tokens-per-step", "16")
    first, *_ = planned(model, by_hand(measured, threads=3), *arguments)
    hours = first["days"] * 24
    assert (first["core_hours"], first["gpu_hours"]) == (pytest.approx(3 * hours), None)
    first, *_ = planned(model, by_hand(measured, device="a GPU"), *arguments)
    assert (first["core_hours"], first["gpu_hours"]) == (None, pytest.approx(hours))


def test_a_sweep_takes_the_measured_times_of_its_cells(model: Path, measured: Path) -> None:
    template = model.with_name("trial.yaml")
    settings = [f"model: {model}", "parallel: {stages: 1}", "schedule: {microbatches: 4}"]
    settings += ["train: {steps: 100, microbatch_size: 1, precision: float32}"]
    settings += ["data: {context: 16}", "site: {device: cpu, threads: 2}"]
    template.write_text("matrix: {schedule: 1f1b, optimizer: [adamw, muon]}\n" + "\n".join(settings))
    file = by_hand(measured, threads=2)
    ended = succeeded("sweep", template, "--list", "--profile", file)
    hours = (4 * (3 + 4 * 12 + 21) + 60) * 100 * 2 / 3600
    assert f"{hours:.3g} core-hours in all (1 of 2 cells)" in ended.errors
    assert "core-h" in ended.output
    # Measured with other threads, and no file of times at all.
    ended = asyncpp("sweep", template, "site.threads=1", "--list", "--profile", file)
    assert (ended.code, "core-h" in ended.output + ended.errors) == (0, False)
    said = refusal("sweep", template, "--list", "--profile", template)
    assert "is not a file of `asyncpp plan --measure`" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "has format 2"),
        ({"parts": {}}, "is not a file of `asyncpp plan --measure`"),
        ({"conditions": {"context": 16}}, "was measured with model None"),
    ],
)
def test_files_that_hold_something_else_are_refused(
    change: dict[str, Any], message: str, model: Path, measured: Path
) -> None:
    file = measured.with_name("wrong.json")
    file.write_text(json.dumps(json.loads(measured.read_text()) | change))
    assert message in refusal("plan", model, *COMMON, "--gpus", "2", "--profile", file)


@pytest.mark.parametrize(
    "other", ["data.context=32", "train.precision=bfloat16", "optimizer=muon", "model.width=64"]
)
def test_times_of_other_runs_are_refused(other: str, model: Path, measured: Path) -> None:
    assert "was measured with" in refusal("plan", model, *COMMON, other, "--gpus", "2", "--profile", measured)


def test_what_is_no_file_of_times_is_refused(model: Path) -> None:
    said = refusal("plan", model, *COMMON, "--gpus", "2", "--profile", "/dev/zero")
    assert "/dev/zero cannot be read (it is not a regular file)" in said
    assert "is a folder" in refusal("plan", model, *COMMON, "--measure", model.parent)
