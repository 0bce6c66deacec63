"""A gap in steps: how many times as many as the synchronous arm needs for the same loss.

A loss falls with the number of steps, so a gap in loss says little without how steeply it falls there.
Between the lengths of synchronous runs, each with a learning rate that falls to its own end, the loss is
taken as linear in the logarithm of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from benchmarks.best_rates import best
from benchmarks.gap_losses import SYNCHRONOUS, Length, Losses

Curve = Sequence[tuple[int, float]]
"""Steps and loss of synchronous runs at their best rates, by steps."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """A factor in steps; None: the synchronous runs are not long or short enough to say."""

    factor: float | None
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.factor is None:
            return "-"
        ends = " to ".join("?" if end is None else f"{end:.2f}" for end in (self.low, self.high))
        return f"{self.factor:.2f} ({ends})"


def curves(losses: Losses) -> Mapping[Length, Curve]:
    """The synchronous curve by size, batch and optimizer: a length with 0 steps."""
    found: dict[Length, list[tuple[int, float]]] = {}
    for length, arms in sorted(losses.items()):
        if SYNCHRONOUS in arms:
            loss = float(np.mean(list(best(arms[SYNCHRONOUS]).losses.values())))
            found.setdefault(replace(length, steps=0), []).append((length.steps, loss))
    return found


def reach(curve: Curve, *, steps: int, gap: float, half_width: float) -> Reach:
    """What a gap after `steps` steps, and the ends of its interval, are in steps."""
    synchronous = dict(curve)[steps]

    def factor(difference: float) -> float | None:
        needed = steps_for(synchronous + difference, curve)
        return None if needed is None else steps / needed

    return Reach(factor=factor(gap), low=factor(gap - half_width), high=factor(gap + half_width))


def steps_for(loss: float, curve: Curve) -> float | None:
    """The steps after which synchronous runs have this loss; None outside of the curve."""
    for (fewer, high), (more, low) in pairwise(curve):
        if low <= loss <= high:
            share = (high - loss) / (high - low)
            return math.exp((1 - share) * math.log(fewer) + share * math.log(more))
    return None
