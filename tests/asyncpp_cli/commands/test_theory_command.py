"""`asyncpp theory`: limits, and what is refused."""

from __future__ import annotations

import json

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
