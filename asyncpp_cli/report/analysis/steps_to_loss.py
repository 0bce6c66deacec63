"""How many more steps a delayed arm needs to the loss of a synchronous one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncpp_cli.report.analysis.statistics import CONFIDENCE, t_quantile

_POINTS = 400
"""Ratios that are tried between the shortest and the longest length."""


class NoRatioError(Exception):
    """The runs do not give a ratio of steps; the message says what is missing, in one line."""


@dataclass(frozen=True, kw_only=True)
class StepsRatio:
    """Steps of a delayed arm to a synchronous arm's loss, over the steps of the synchronous arm."""

    ratio: float
    low: float | None
    """Bounds of the interval of level `CONFIDENCE`; None where it reaches beyond the lengths of the runs."""
    high: float | None
    seeds: tuple[Any, ...]
    """That both arms have at every length."""


def steps_ratio(
    *, steps: int, loss: Mapping[Any, float], delayed: Mapping[int, Mapping[Any, float]]
) -> StepsRatio:
    """Estimate the ratio k at which the delayed arm's loss after k x `steps` steps is the synchronous one's.

    Between the lengths of the runs, a seed's loss follows a parabola over the logarithm of the steps through
    the three nearest lengths (a line through two). A ratio is in the interval if, at that ratio, a paired t
    test over the seeds does not tell the two losses apart. As in Fieller's theorem (J. R. Stat. Soc. B 16,
    1954), the interval includes the error of the interpolated losses, and need not be finite.

    Args:
        steps: of the synchronous runs.
        loss: of the synchronous arm by seed, nats per token.
        delayed: losses of the delayed arm by number of steps and seed; each length a run of its own, whose
            learning rate falls to its own end.

    Raises:
        NoRatioError: fewer than two lengths or two common seeds; or the lengths do not bracket the loss.
    """
    lengths = sorted(delayed)
    if len(lengths) < 2:
        raise NoRatioError(
            "it was run in one length, and steps to a loss need two that bracket it (matrix.train.steps)"
        )
    seeds = sorted(loss.keys() & set.intersection(*(set(of) for of in delayed.values())), key=str)
    if len(seeds) < 2:
        raise NoRatioError(f"an interval needs two seeds that all lengths have; there are {len(seeds)}")
    places = np.log(np.array(lengths) / steps)
    tried = np.linspace(places[0], places[-1], _POINTS + 1)
    of_seeds = np.array([[delayed[length][seed] for length in lengths] for seed in seeds])
    above = of_seeds @ _weights(places, tried) - np.array([[loss[seed]] for seed in seeds])
    means = above.mean(axis=0)
    errors = above.std(axis=0, ddof=1) / math.sqrt(len(seeds))
    crossings = np.flatnonzero((means[:-1] > 0) & (means[1:] <= 0))
    if not crossings.size:
        if means[-1] > 0:
            raise NoRatioError(f"its longest runs end {means[-1]:.3f} above it: longer ones are needed")
        raise NoRatioError(f"its shortest runs end {-means[0]:.3f} below it: shorter ones are needed")
    crossing = int(crossings[-1])
    # Above zero where the test tells the losses apart.
    beyond = np.abs(means) - t_quantile((1 + CONFIDENCE) / 2, len(seeds) - 1) * errors
    inside = [int(index) for index in np.flatnonzero(beyond <= 0)] or [crossing, crossing + 1]
    low, high, step = inside[0], inside[-1], tried[1] - tried[0]
    share = _part(-means[crossing], -means[crossing + 1])
    return StepsRatio(
        ratio=math.exp(tried[crossing] + share * step),
        low=None if low == 0 else math.exp(tried[low] - step * _part(beyond[low], beyond[low - 1])),
        high=None
        if high == _POINTS
        else math.exp(tried[high] + step * _part(beyond[high], beyond[high + 1])),
        seeds=tuple(seeds),
    )


def _weights(places: np.ndarray, tried: np.ndarray) -> np.ndarray:
    """Weights of the values at `places` in their interpolation at each of `tried`: (places, tried).

    Between two places the parabolas through them and either neighbour are mixed in proportion, so that the
    interpolation is continuous.
    """
    count = len(places)
    if count == 2:
        return _lagrange(places, tried)
    weights = np.zeros((count, len(tried)))
    left = np.clip(np.searchsorted(places, tried) - 1, 0, count - 2)
    share = (tried - places[left]) / (places[left + 1] - places[left])
    for first in range(count - 2):
        parabola = _lagrange(places[first : first + 3], tried)
        before, after = np.clip(left - 1, 0, count - 3) == first, np.clip(left, 0, count - 3) == first
        weights[first : first + 3] += parabola * (before * (1 - share) + after * share)
    return weights


def _lagrange(places: np.ndarray, tried: np.ndarray) -> np.ndarray:
    return np.array(
        [
            np.prod([(tried - other) / (own - other) for other in places if other != own], axis=0)
            for own in places
        ]
    )


def _part(inside: float, outside: float) -> float:
    """Share of the way from a value of at most zero to one above zero at which zero is crossed."""
    return min(1.0, max(0.0, -inside / (outside - inside)))
