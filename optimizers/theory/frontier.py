"""Limit, noise and lag of a filter together (`optimizers.theory.filters`). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from optimizers.theory.filters import Filter, lag, limit, noise


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
