"""`asyncpp theory`: limits and rates, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command_line import asyncpp, refusal, succeeded


@pytest.mark.parametrize(
    ("momentum", "beta", "delay", "coefficient", "limit"),
    [
        ("none", "0", "0", "0", 2.0),
        ("ema", "0.9", "1", "0", 1.0),
        ("nesterov-ema", "0.95", "1", "1", 6.78),
    ],
)
def test_stability_as_json(momentum: str, beta: str, delay: str, coefficient: str, limit: float) -> None:
    ended = succeeded(
        *("theory", "stability", "--momentum", momentum, "--beta", beta),
        *("--delay", delay, "--coefficient", coefficient, "--json"),
    )
    assert ended.errors == ""
    found = json.loads(ended.output)
    assert found["limit"] == pytest.approx(limit, abs=0.005)
    assert found["momentum"] == momentum


@pytest.mark.slow
def test_stability_table() -> None:
    ended = succeeded("theory", "stability")
    (row,) = [line.split() for line in ended.output.splitlines() if line.startswith("nesterov-ema  0.95")]
    assert row[2:5] == ["26.9", "3.75", "6.78"]
    assert "delay 3" in asyncpp("theory", "stability", "--delay", "3").output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--momentum", "ema", "--beta", "1"], "beta is 1, accepted: at least 0 and below 1"),
        (["--momentum", "ema", "--delay", "-1"], "delay is -1, accepted: 0 to 100"),
        (["--momentum", "none", "--coefficient", "-1"], "coefficient is -1, accepted: 0 to 100"),
        (["--json"], "--json wants one case"),
        (["--delay", "-2"], "delay is -2"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], reason: str) -> None:
    assert reason in refusal("theory", "stability", *arguments)


@pytest.mark.slow
def test_convergence_has_the_rate_in_every_arm() -> None:
    """Slopes of -0.5 come with long runs; from 128 to 512 steps they are past -0.3 and falling."""
    ended = succeeded("theory", "convergence", "--steps", "32,128,512", "--json")
    arms = {row["arm"]: row for row in json.loads(ended.output)}
    assert list(arms) == ["synchronous", "delay 1", "delay 1 with error feedback"]
    for row in arms.values():
        assert -0.6 < row["rate"] < -0.3
        assert row["norms"] == sorted(row["norms"], reverse=True)
    last = [row["norms"][-1] for row in arms.values()]
    assert last[0] < last[2] < last[1], "a delay costs, and error feedback pays some of it back"


@pytest.mark.parametrize("steps", ["10", "ten,20", "0,5"])
def test_bad_lengths_are_one_line(steps: str) -> None:
    assert "--steps is" in refusal("theory", "convergence", "--steps", steps)


def test_frontier_as_json_and_as_a_picture(tmp_path: Path) -> None:
    drawn = tmp_path / "frontier.svg"
    ended = succeeded("theory", "frontier", "--lags", "20,0.1,10", "--out", str(drawn), "--json")
    found = json.loads(ended.output)
    optimizers = {row["name"]: row for row in found["optimizers"]}
    assert optimizers["adamw"]["limit"] == pytest.approx(1.0)
    assert optimizers["adamw"]["lag"] == pytest.approx(10.0)
    assert [row["lag"] for row in found["frontier"]] == pytest.approx([0.1, 0.1, 10.0, 10.0, 20.0, 20.0])
    assert optimizers["sgd without momentum"]["settling"] == pytest.approx(99, abs=1)
    assert all(0 < row["share"] <= 1 for row in optimizers.values())
    assert drawn.read_text(encoding="utf-8").startswith("<?xml")


def test_frontier_table_says_what_is_unstable() -> None:
    ended = succeeded("theory", "frontier", "--delay", "2", "--lags", "20", "--step", "0.9")
    (adamw,) = [line.split() for line in ended.output.splitlines() if line.startswith("adamw  ")]
    assert adamw[1:4] == ["0.9", "1", "0"]
    assert adamw[-2] == "unstable"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--lags", "ten"], "--lags is 'ten', accepted: numbers up to"),
        (["--lags", "nan"], "--lags is 'nan', accepted: numbers up to"),
        (["--step", "0"], "--step is 0, accepted: above 0"),
        (["--step", "nan"], "'--step': 'nan', accepted: a finite number"),
        (["--small-step", "-1"], "--small-step is -1, accepted: above 0"),
        (["--out", "frontier.gif"], "frontier.gif: a picture is a file of .svg, .png, .pdf"),
    ],
)
def test_bad_arguments_of_frontier_are_one_line(arguments: list[str], reason: str) -> None:
    assert reason in refusal("theory", "frontier", *arguments)
