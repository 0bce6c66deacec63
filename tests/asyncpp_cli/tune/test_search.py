"""The points that a tuning tries."""

from __future__ import annotations

import math

import pytest

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.tune.search import parse_over, points


def test_a_grid_in_the_logarithm() -> None:
    tried = points([parse_over("optimizer.lr=1e-4:1e-1:log")], samples=4, search_seed=None)
    assert [point["optimizer.lr"] for point in tried] == [1e-4, 1e-3, 1e-2, 1e-1]


def test_a_product_of_a_range_and_a_list() -> None:
    overs = [parse_over("optimizer.weight_decay=0:0.2"), parse_over("optimizer=[adamw,muon]")]
    tried = points(overs, samples=3, search_seed=None)
    assert [tuple(point.values()) for point in tried] == [
        (decay, name) for decay in (0.0, 0.1, 0.2) for name in ("adamw", "muon")
    ]


def test_integers_are_rounded() -> None:
    tried = points([parse_over("train.microbatch_size=1:8:log")], samples=4, search_seed=None)
    assert [point["train.microbatch_size"] for point in tried] == [1, 2, 4, 8]


def test_points_drawn_at_random() -> None:
    overs = [parse_over("optimizer.lr=1e-4:1e-1:log")]
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
    with pytest.raises(UserError, match="fewer than 8"):
        points([parse_over("train.microbatch_size=1:3")], samples=8, search_seed=None)
    with pytest.raises(UserError, match="fewer than 8"):
        points([parse_over("train.microbatch_size=1:3")], samples=8, search_seed=0)
    with pytest.raises(UserError, match="given twice"):
        points([parse_over("seed=[1,2]"), parse_over("seed=[3,4]")], samples=2, search_seed=None)
