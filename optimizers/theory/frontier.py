"""The frontier of momentum under delay: filters that no other beats in stability limit, noise gain and lag.

A filter of memory m, look-ahead a and coefficient c (`optimizers.theory.filters`) has a lag of d + m - a - c.
For a lag the search is over a and c: a grid, and finer grids around the best point. Limit and noise both
improve with the lag, so the frontier has a point for each lag and noise. Imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from optimizers.theory.filters import Filter, lag, limit, noise

_MOST = 3.0
"""Largest look-ahead and coefficient searched."""
_COARSE = 12
_ROUNDS = 8
_NEIGHBOURS = (-2, -1, 0, 1, 2)

NAMED: Mapping[str, Filter] = {
    "sgd without momentum": Filter(0.0, 0.0, 0.0),
    "adamw": Filter(0.9, 1.0, 0.0),
    "adamw, beta1 0.95": Filter(0.95, 1.0, 0.0),
    "adamw, c = 0.5": Filter(0.9, 1.0, 0.5),
    "adamw, c = 1": Filter(0.9, 1.0, 1.0),
    "adamw, c = 2": Filter(0.9, 1.0, 2.0),
    "adamw, beta1 0.95, c = 2": Filter(0.95, 1.0, 2.0),
    "nesterov 0.9": Filter(0.9, 0.9, 0.0),
    "nesterov 0.95 (muon)": Filter(0.95, 0.95, 0.0),
    "nesterov 0.95, c = 0.5": Filter(0.95, 0.95, 0.5),
    "nesterov 0.95, c = 1": Filter(0.95, 0.95, 1.0),
    "nesterov 0.99": Filter(0.99, 0.99, 0.0),
    "qhadamw": Filter(0.95, 0.75, 0.0),
    "nadamw at its start": Filter(0.99, 0.99 / 2, 0.0),
    "lion": Filter(0.99, 0.9 / 0.99, 0.0),
}
"""Optimizers as they are used, with the catalogue's defaults where nothing else is said.

`nadamw` (torch's NAdam) raises the weight of its momentum from beta1 / 2 towards beta1 over some 40 /
momentum_decay steps, 10,000 with the default of 0.004. Lion's sign is not linear; its point is that of the
direction before the sign.
"""


@dataclass(frozen=True)
class Point:
    """A filter under a delay, with its largest stable eta h, noise gain and lag in updates."""

    filter: Filter
    limit: float
    noise: float
    lag: float


def point(candidate: Filter, *, delay: int) -> Point:
    """The measures of a filter.

    Raises:
        ValueError: A negative delay.
    """
    return Point(
        filter=candidate,
        limit=limit(candidate, delay=delay),
        noise=noise(candidate),
        lag=lag(candidate, delay=delay),
    )


def most_stable(*, delay: int, within: float, noise_budget: float = float("inf")) -> Point | None:
    """The point with the largest limit among those with a lag of `within` updates and at most this noise.

    None if there is none.
    """
    return _search(
        lambda found: found.limit if found.noise <= noise_budget else None, delay=delay, within=within
    )


def least_noise(*, delay: int, within: float, limit_at_least: float) -> Point | None:
    """The point with the least noise among those with a lag of `within` updates and at least this limit.

    None if there is none.
    """
    return _search(
        lambda found: -found.noise if found.limit >= limit_at_least else None, delay=delay, within=within
    )


def share_of_frontier(found: Point, *, delay: int) -> float:
    """The limit as a share of the largest one with the same lag and no more noise; 1 on the frontier."""
    best = most_stable(delay=delay, within=found.lag, noise_budget=found.noise)
    return 1.0 if best is None else min(1.0, found.limit / best.limit)


def frontier(*, delay: int, lags: Sequence[float], share: float) -> list[tuple[Point, Point]]:
    """For each lag the point with the largest limit, and the one with the least noise among those with at
    least `share` of that limit.

    A lag without a filter is left out.
    """
    points = []
    for within in lags:
        best = most_stable(delay=delay, within=within)
        if best is not None:
            quiet = least_noise(delay=delay, within=within, limit_at_least=share * best.limit)
            points.append((best, quiet or best))
    return points


def _search(score: Callable[[Point], float | None], *, delay: int, within: float) -> Point | None:
    """The point with the highest score, over look-ahead and coefficient; a score of None is refused."""
    best: tuple[float, Point] | None = None

    def consider(ahead: float, coefficient: float) -> None:
        nonlocal best
        memory = within - delay + ahead + coefficient
        if not (0 <= ahead <= memory and 0 <= coefficient <= _MOST):
            return
        weight = 1.0 if memory == 0 else 1 - ahead / memory
        candidate = point(Filter(memory / (1 + memory), weight, coefficient), delay=delay)
        value = score(candidate)
        if value is not None and (best is None or value > best[0]):
            best = value, candidate

    spacing = _MOST / _COARSE
    for i, j in itertools.product(range(_COARSE + 1), repeat=2):
        consider(i * spacing, j * spacing)
    for _ in range(_ROUNDS):
        if best is None:
            return None
        spacing /= 2
        chosen = best[1].filter
        ahead = (1 - chosen.weight) * chosen.beta / (1 - chosen.beta)
        for i, j in itertools.product(_NEIGHBOURS, repeat=2):
            consider(ahead + i * spacing, chosen.coefficient + j * spacing)
    return None if best is None else best[1]
