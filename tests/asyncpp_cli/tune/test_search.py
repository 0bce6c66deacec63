"""The points that a tuning tries."""

from __future__ import annotations

import math
from typing import Any

import pytest

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.tune.plan import parse_over, points

RATES = "optimizer.lr=1e-4:1e-1:log"


@pytest.mark.parametrize(
    ("overs", "samples", "expected"),
    [
        ([RATES], 4, [(1e-4,), (1e-3,), (1e-2,), (1e-1,)]),
        (
            ["optimizer.weight_decay=0:0.2", "optimizer=[adamw,muon]"],
            3,
            [(decay, name) for decay in (0.0, 0.1, 0.2) for name in ("adamw", "muon")],
        ),
        (["train.microbatch_size=1:8:log"], 4, [(1,), (2,), (4,), (8,)]),
    ],
)
def test_a_grid(overs: list[str], samples: int, expected: list[tuple[Any, ...]]) -> None:
    tried = points([parse_over(over) for over in overs], samples=samples, search_seed=None)
    assert [tuple(point.values()) for point in tried] == expected
    assert list(tried[0]) == [parse_over(over).key for over in overs]


def test_points_drawn_at_random() -> None:
    overs = [parse_over(RATES)]
    first, again, other = (points(overs, samples=8, search_seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    rates = [point["optimizer.lr"] for point in first]
    assert rates == sorted(set(rates))
    assert all(1e-4 <= rate <= 1e-1 for rate in rates)
    # Even in the logarithm: the mean of 800 of them is off the middle by less than four standard deviations.
    many = [
        math.log10(point["optimizer.lr"])
        for seed in range(100)
        for point in points(overs, samples=8, search_seed=seed)
    ]
    assert abs(sum(many) / len(many) - -2.5) < 4 * 3 / math.sqrt(12 * len(many))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer.lr", "accepted: KEY=LOW:HIGH"),
        ("optimizer.lr=1e-3", "accepted: KEY=LOW:HIGH"),
        ("optimizer.lr=1:2:cubic", "LOW must be less than HIGH"),
        ("optimizer.lr=1:2:log:3", "LOW must be less than HIGH"),
        ("optimizer.lr=2:1", "LOW must be less than HIGH"),
        ("optimizer.lr=nan:1", "LOW must be less than HIGH"),
        ("optimizer.lr=0:1:log", "begins above 0"),
        ("optimizer.lr=[]", "accepted: KEY=LOW:HIGH"),
        ("optimizer.lr=[1e-3,1e-3]", "given twice"),
        ("optimizer.lr=[fast]", "must be a number"),
        ("optimizer.rate=1:2", "unknown key"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_over(text)


def test_too_few_points_are_refused() -> None:
    for seed in (None, 0):
        with pytest.raises(UserError, match="fewer than 8"):
            points([parse_over("train.microbatch_size=1:3")], samples=8, search_seed=seed)
    with pytest.raises(UserError, match="given twice"):
        points([parse_over("seed=[1,2]"), parse_over("seed=[3,4]")], samples=2, search_seed=None)
