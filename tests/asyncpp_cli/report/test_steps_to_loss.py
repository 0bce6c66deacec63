"""Steps to a loss: known curves, what is missing, and how often the intervals hold the truth.

    python tests/asyncpp_cli/report/test_steps_to_loss.py DRAWS

prints the table of the simulation for DRAWS draws of each combination.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise, product

import numpy as np
import pytest

from asyncpp_cli.report.analysis.statistics import paired
from asyncpp_cli.report.analysis.steps_to_loss import NoRatioError, StepsRatio, steps_ratio, time_interval

Curve = Callable[[float], float]
"""Loss by steps, over those of the synchronous runs."""


def _kink(at: float, before: float, after: float) -> Curve:
    """A line over the logarithm of the steps whose slope changes within about a third of its size."""

    def loss(steps: float) -> float:
        bend = 0.1 * np.logaddexp(0, (math.log(steps) - at) / 0.1)
        return float(3 - before * math.log(steps) - (after - before) * bend)

    return loss


SHAPES: Mapping[str, Callable[[float], Curve]] = {
    "power law": lambda at: lambda steps: 3 * steps**-0.3,
    "floor": lambda at: lambda steps: 1.4 + 3 * steps**-0.5,
    "kink": lambda at: _kink(at, 0.8, 0.4),
    "drop": lambda at: _kink(at, 0.4, 0.8),
    "convex": lambda at: lambda steps: 1.5 + 2 * math.exp(-2.2 * steps) + 0.3 * steps**-0.3,
    "noisy late": lambda at: lambda steps: 1.4 + 2 * steps**-0.4,
}
"""By name, each with where its kink is (logarithm of the steps), if it has one."""

DESIGNS = ((0.75, 1, 1.33), (0.7, 1, 1.4, 2), (1, 1.41, 2), (0.6, 1.2, 2.4), (0.5, 1, 2, 4), (0.95, 1.2))
"""Lengths over the synchronous one."""

SEEDS = (2, 3, 5, 10)
NOISE = (0.004, 0.01, 0.03)
"""Of a loss, in steps: over the slope of the curve at the synchronous length."""

_STEPS = 1000
"""Of the synchronous runs."""


def simulated(
    draw: np.random.Generator, shape: str, lengths: tuple[float, ...], seeds: int, noise: float, *, even: bool
) -> tuple[float, StepsRatio, tuple[float, float] | None] | None:
    """A draw: the true ratio, what is estimated, and the interval of the time, which is truly 1.

    None if no ratio is given.

    Args:
        draw: the source of chance.
        shape: one of `SHAPES`.
        lengths: of the delayed arm.
        seeds: number of them.
        noise: one of `NOISE`.
        even: whether all lengths are as noisy; else each by a factor of its own, from 0.4 to 2.7.
    """
    curve = SHAPES[shape](draw.uniform(-0.4, 0.4))
    ratio = math.exp(draw.uniform(math.log(lengths[0] * 1.02), math.log(lengths[-1] / 1.02)))
    spread = noise * (curve(0.99) - curve(1.01)) / 0.02
    of_seeds = draw.normal(0, 5 * spread, seeds)
    spreads = spread * (np.ones(len(lengths)) if even else np.exp(draw.uniform(-1, 1, len(lengths))))
    if shape == "noisy late":
        spreads = spreads * np.array(lengths) ** 1.5
    delayed = {
        round(length * _STEPS): dict(
            enumerate(curve(length / ratio) + of_seeds + draw.normal(0, each, seeds))
        )
        for length, each in zip(lengths, spreads, strict=True)
    }
    try:
        loss = dict(enumerate(curve(1) + of_seeds + draw.normal(0, spread, seeds)))
        found = steps_ratio(steps=_STEPS, loss=loss, delayed=delayed)
    except NoRatioError:
        return None
    speed = paired([math.log(ratio) + float(each) for each in draw.normal(0, 0.01, seeds)])
    assert speed is not None
    return ratio, found, time_interval(found, speed)


def tallied(draws: int, *, combined: bool) -> Iterator[tuple[str, str, Counter[str]]]:
    """What happened to the draws, for each value of a factor; each combination has as many.

    Args:
        draws: of each combination of shape, seeds and evenness; with designs and noise too if `combined`.
        combined: whether designs and noise are combined with the others; else each draw has any of them.
    """
    tallies: dict[tuple[str, str], Counter[str]] = {}
    draw = np.random.default_rng(52)
    others = list(product(DESIGNS, NOISE))
    for shape, seeds, even in product(SHAPES, SEEDS, (True, False)):
        each = others * draws if combined else [others[at] for at in draw.integers(0, len(others), draws)]
        for lengths, noise in each:
            found = simulated(draw, shape, lengths, seeds, noise, even=even)
            happened = Counter(["drawn"])
            if found is not None:
                ratio, steps, time = found
                happened["given"] = 1
                happened["k"] = (steps.low or 0) <= ratio <= (steps.high or math.inf)
                happened["time"] = time is None or time[0] <= 1 <= time[1]
                happened["pays"] = time is not None and time[1] < 1
                happened["does not pay"] = time is not None and time[0] > 1
                happened["closed"] = time is not None
            for factor, value in (
                *(("shape", shape), ("seeds", seeds), ("lengths", lengths), ("noise", noise)),
                *(("even", even), ("shape, lengths", (shape, lengths))),
            ):
                tallies.setdefault((factor, str(value)), Counter()).update(happened)
    for (factor, value), tally in tallies.items():
        yield factor, value, tally


@pytest.mark.slow
def test_intervals_hold_the_truth_and_answers_are_seldom_wrong() -> None:
    """For each shape, number of seeds, set of lengths and noise. The time is truly 1: any answer is wrong."""
    wrong = [
        (factor, value, dict(tally))
        for factor, value, tally in tallied(100, combined=False)
        if min(tally["k"], tally["time"]) < 0.92 * tally["given"]
        or max(tally["pays"], tally["does not pay"]) > 0.03 * tally["drawn"]
    ]
    assert not wrong


def test_the_ratio_of_a_curve_without_noise_is_found() -> None:
    def loss(steps: float) -> dict[int, float]:
        return {seed: 1.4 + 9 * steps**-0.35 + shift for seed, shift in enumerate((0.0, 0.02, -0.01))}

    for ratio in (0.9, 1.0, 1.23, 1.6):
        delayed = {length: loss(length / ratio) for length in (900, 1300, 1700, 2400)}
        found = steps_ratio(steps=1200, loss=loss(1200), delayed=delayed)
        # What a parabola leaves of this curve between lengths a factor of 1.4 apart.
        assert found.ratio == pytest.approx(ratio, abs=2e-3)
        assert found.by_curve[0] < found.ratio < found.by_curve[1]


@pytest.mark.parametrize(
    ("delayed", "message", "lengths"),
    [
        ({1200: {0: 2.0, 1: 2.0}}, "one length", ()),
        ({900: {0: 2.1}, 1100: {0: 2.05}, 1400: {0: 1.9}}, "two seeds", ()),
        # Losses of 54 thousand parameters (Muon, error feedback), where 1,200 steps reach it.
        (
            {300: {0: 2.134, 1: 2.14}, 4800: {0: 1.67, 1: 1.68}},
            "0.25 to 4.00 times the tokens",
            (300, 600, 1200, 2400, 4800),
        ),
        ({1000: {0: 2.1, 1: 2.1}, 1320: {0: 1.9, 1: 1.9}}, "too far apart", (1000, 1149, 1320)),
        ({600: {0: 2.6, 1: 2.6}, 900: {0: 2.4, 1: 2.5}}, "runs end 0.45 above", (600, 900, 1273, 1800)),
        ({1200: {0: 1.8, 1: 1.7}, 2400: {0: 1.6, 1: 1.5}}, "runs end 0.25 below", (600, 849, 1200, 2400)),
        ({1200: {0: 2.0, 1: 2.0}, 1300: {0: 2.0, 1: 2.0}}, "end at the same loss", (600, 849, 1200, 1300)),
        ({900: {0: 2.1, 1: 2.1}, 1300: {0: 1.9, 1: math.nan}}, "not finite", ()),
    ],
)
def test_what_is_missing_is_said(
    delayed: Mapping[int, Mapping[int, float]], message: str, lengths: tuple[int, ...]
) -> None:
    """And the lengths that would be enough are between bounds on what may be apart."""
    with pytest.raises(NoRatioError, match=message) as raised:
        steps_ratio(steps=1200, loss={0: 2.0, 1: 2.0}, delayed=delayed)
    assert raised.value.lengths == lengths
    assert all(after <= 2 * before for before, after in pairwise(lengths))


def main() -> None:
    columns = ("k", "time", "pays", "does not pay", "closed")
    print("| factor | value | given | " + " | ".join(columns) + " |")
    for factor, value, tally in tallied(int(sys.argv[1]), combined=True):
        shares = (f"{tally[name] / tally['given']:.3f}" for name in columns)
        print(f"| {factor} | {value} | {tally['given'] / tally['drawn']:.3f} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
