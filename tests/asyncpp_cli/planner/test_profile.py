"""`asyncpp profile` and what `plan` makes of its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.command_line import asyncpp

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
    ended = asyncpp("profile", model, *COMMON, "--out", file, *sizes, "--repeats", "3")
    assert ended.code == 0, ended.errors
    assert "a block takes" in ended.output
    return file


def planned(model: Path, file: Path, *arguments: str) -> list[dict[str, Any]]:
    ended = asyncpp("plan", model, *COMMON, "--profile", file, "--memory", "1", *arguments, "--json")
    assert ended.code == 0, ended.errors
    found: list[dict[str, Any]] = json.loads(ended.output)
    return found


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


def test_plans_are_made_of_the_measured_times(model: Path, measured: Path) -> None:
    """By hand, for one stage: it computes everything, one micro-batch after another."""
    parts = {
        "embedding": {"forward": 1.0, "backward": 2.0, "input_half": 0.5, "weight_half": 2.0, "cheap": 0.0},
        "block": {"forward": 3.0, "backward": 9.0, "input_half": 4.5, "weight_half": 5.5, "cheap": 0.5},
        "head": {"forward": 6.0, "backward": 15.0, "input_half": 7.0, "weight_half": 9.0, "cheap": 0.0},
    }
    content = json.loads(measured.read_text())
    for name, times in parts.items():
        doubled = {key: 2 * seconds for key, seconds in times.items()}
        content["parts"][name] = {"microbatch": {"1": times, "2": doubled}, "update": 10.0}
    file = measured.with_name("by-hand.json")
    file.write_text(json.dumps(content))
    found = planned(model, file, "--gpus", "1", "--tokens-per-step", str(16 * 4))
    times_of = {(one["microbatch_size"], one["recompute"]): one["step_time"] for one in found}
    update = 10 + 4 * 10 + 10
    once = 3 + 4 * 12 + 21
    for size in (1, 2, 4):  # 4 was not measured: twice as long as 2
        assert times_of[size, "none"] == pytest.approx(4 * once + update)
        assert times_of[size, "selective"] == pytest.approx(4 * (once + 4 * 0.5) + update)
        assert times_of[size, "full"] == pytest.approx(4 * (once + 4 * 3) + update)
    two = planned(model, file, "--gpus", "2", "--tokens-per-step", str(16 * 4), "--schedule", "2bw")
    alone = [
        one for one in two if (one["stages"], one["microbatch_size"], one["recompute"]) == (2, 1, "none")
    ]
    # 2bw is as fast as its slowest stage: two blocks and the head.
    assert alone[0]["cut"] == [3, 1]
    assert alone[0]["step_time"] == pytest.approx(4 * (3 + 3 * 12) + 40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "has format 2"),
        ({"parts": {}}, "is not a file of `asyncpp profile`"),
        ({"conditions": {"context": 16}}, "was measured with model None"),
    ],
)
def test_files_that_hold_something_else_are_refused(
    change: dict[str, Any], message: str, model: Path, measured: Path
) -> None:
    file = measured.with_name("wrong.json")
    file.write_text(json.dumps(json.loads(measured.read_text()) | change))
    refused = asyncpp("plan", model, *COMMON, "--gpus", "2", "--profile", file)
    assert refused.code == 2
    assert message in refused.errors


@pytest.mark.parametrize(
    "other", ["data.context=32", "train.precision=bfloat16", "optimizer=muon", "model.width=64"]
)
def test_times_of_other_runs_are_refused(other: str, model: Path, measured: Path) -> None:
    refused = asyncpp("plan", model, *COMMON, other, "--gpus", "2", "--profile", measured)
    assert (refused.code, "was measured with" in refused.errors) == (2, True)


def test_a_profile_needs_a_file_to_write(model: Path) -> None:
    refused = asyncpp("profile", model, *COMMON, "--out", model.parent)
    assert (refused.code, "a folder; give the name of a file" in refused.errors) == (2, True)
