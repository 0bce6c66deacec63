"""How many more steps a delayed arm needs to the loss of a synchronous one.

The delayed arm is run in several lengths, and its loss at other lengths has to be read off between them. What
is not known there is the shape of the curve: with lengths 1 and 4 and the curve 1.4 + 3 T^-0.5, a straight
line puts a ratio of 2 at 2.25, and more seeds only make that look certain. So the interval has two parts:
the seeds, by a paired t test, and the curve, by the lines that bound it between two lengths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from asyncpp_cli.report.analysis.statistics import CONFIDENCE, Interval, t_quantile

MOST_APART = 2.0
"""Largest ratio of a length to the one before, where there are three or more."""

TWO_APART = 1.3
"""Largest ratio of two lengths."""

_BEND = 2.0
"""Between two lengths without a third one the loss may be a line over this power of the steps, or over its
inverse: the curve's slope over the logarithm of the steps changes by up to `TWO_APART` squared, 1.7."""

_POINTS = 400
"""Ratios that are tried between the shortest and the longest length."""


class NoRatioError(Exception):
    """The runs do not give a ratio of steps; the message says why, in one line."""

    def __init__(self, reason: str, *, lengths: Sequence[int] = (), few_seeds: bool = False) -> None:
        super().__init__(reason)
        self.lengths = tuple(lengths)
        """That the delayed arm should have; empty if lengths are not what is missing."""
        self.few_seeds = few_seeds
        """Whether seeds are."""


@dataclass(frozen=True, kw_only=True)
class StepsRatio:
    """Steps of a delayed arm to a synchronous arm's loss, over the steps of the synchronous arm."""

    ratio: float
    by_curve: tuple[float, float]
    """The ratios that the curve's shape allows at the mean losses."""
    low: float | None
    """Bounds of the interval of level `CONFIDENCE`, by seeds and curve; None where it reaches beyond the
    lengths of the runs."""
    high: float | None
    seeds: tuple[Any, ...]
    """That both arms have at the lengths used."""


def steps_ratio(
    *, steps: int, loss: Mapping[Any, float], delayed: Mapping[int, Mapping[Any, float]]
) -> StepsRatio:
    """Estimate the ratio k at which the delayed arm's loss after k x `steps` steps is the synchronous one's.

    Used are the lengths around the loss of which none is more than `MOST_APART` times the one before; three
    at least, or two within `TWO_APART`. Over the logarithm of the steps, a convex curve lies between its
    chord of two neighbouring lengths and the chords before and after, drawn on; a concave one on their other
    side. The chord and the nearer of the others are the bounds, a parabola between them the estimate. (A
    power law with a floor lies between them, too, and is not enough: simulated, it misses a kink nearly
    always.) A ratio is in the interval if a paired t test over the seeds does not tell the synchronous loss
    from one between the bounds there. As in Fieller's theorem (J. R. Stat. Soc. B 16, 1954), that includes
    the error of the losses that are read off, and the interval need not be finite.

    Args:
        steps: of the synchronous runs.
        loss: of the synchronous arm by seed, nats per token.
        delayed: losses of the delayed arm by number of steps and seed; each length a run of its own, whose
            learning rate falls to its own end.

    Raises:
        NoRatioError: a loss is not finite; too few lengths or seeds, or lengths too far apart; or the lengths
            do not bracket the loss.
    """
    above = {
        length: {seed: of[seed] - loss[seed] for seed in of if seed in loss}
        for length, of in sorted(delayed.items())
        if of.keys() & loss.keys()
    }
    if not all(math.isfinite(each) for of in above.values() for each in of.values()):
        raise NoRatioError("losses of it, or of the synchronous runs, are not finite")
    lengths = _around_the_loss(
        {length: float(np.mean(list(of.values()))) for length, of in above.items()}, steps
    )
    seeds = sorted(set.intersection(*(set(above[length]) for length in lengths)), key=str)
    if len(seeds) < 2:
        raise NoRatioError(
            f"an interval needs two seeds that all lengths have; there are {len(seeds)}", few_seeds=True
        )
    places = np.log(np.array(lengths) / steps)
    tried = np.linspace(places[0], places[-1], _POINTS + 1)
    of_seeds = np.array([[above[length][seed] for seed in seeds] for length in lengths])
    estimate, *bounds = _curves(places, tried, of_seeds)
    middles = np.array([bound.mean(axis=1) for bound in bounds])
    # Of the chord: the other bounds are noisier, and leave more room than a curve without a kink takes.
    reach = (
        t_quantile((1 + CONFIDENCE) / 2, len(seeds) - 1)
        * bounds[0].std(axis=1, ddof=1)
        / math.sqrt(len(seeds))
    )
    # Above zero where a ratio is not in the range of the curve and, further out, not in the interval.
    outside = np.maximum(middles.min(axis=0), -middles.max(axis=0))
    beyond = outside - reach
    ratio = _last_zero(tried, estimate.mean(axis=1))
    least, most = _range(tried, outside, ratio)
    low, high = _range(tried, beyond, ratio)
    return StepsRatio(
        ratio=math.exp(min(max(ratio, least), most)),
        by_curve=(math.exp(least), math.exp(most)),
        low=None if low == tried[0] else math.exp(low),
        high=None if high == tried[-1] else math.exp(high),
        seeds=tuple(seeds),
    )


def time_interval(
    steps: StepsRatio, log_speed: Interval, *, errors: float = 1.0
) -> tuple[float, float] | None:
    """The interval of the time to the loss over the synchronous time, k / r; None if one side is open.

    The errors of k's and r's logarithms by the seeds are independent, and their distances from the middle add
    as squares (Zou and Donner, Statistics in Medicine 27, 2008); what the curve allows is no error of chance,
    and adds to them.

    Args:
        steps: k.
        log_speed: of the logarithm of r, the ratio of tokens per second.
        errors: that the seeds would have with more of them, over those that they have.
    """
    if steps.low is None or steps.high is None:
        return None
    least, most = steps.by_curve
    middle, speed = (log_speed.low + log_speed.high) / 2, log_speed.half_width
    return (
        math.exp(math.log(least) - middle - errors * math.hypot(math.log(least / steps.low), speed)),
        math.exp(math.log(most) - middle + errors * math.hypot(math.log(steps.high / most), speed)),
    )


def _around_the_loss(means: Mapping[int, float], steps: int) -> list[int]:
    """The lengths to use, of those with these mean losses above the one of so many synchronous steps."""
    lengths = list(means)
    if len(lengths) < 2:
        raise NoRatioError("it was run in one length, and that takes three")
    brackets = [
        place
        for place, (before, after) in enumerate(pairwise(lengths))
        if means[before] >= 0 >= means[after] and means[before] > means[after]
    ]
    if not brackets:
        shortest, longest = lengths[0], lengths[-1]
        if means[longest] > 0:
            raise NoRatioError(
                f"its longest runs end {means[longest]:.2g} above it: longer ones are needed",
                lengths=[*lengths, math.ceil(longest * math.sqrt(MOST_APART)), int(longest * MOST_APART)],
            )
        ends = f"{-means[shortest]:.2g} below it" if means[shortest] else "at the same loss"
        raise NoRatioError(
            f"its shortest runs end {ends}: shorter ones are needed",
            lengths=[math.ceil(shortest / MOST_APART), math.ceil(shortest / math.sqrt(MOST_APART)), *lengths],
        )
    first, last = brackets[-1], brackets[-1] + 1
    short, long = lengths[first], lengths[last]
    while first > 0 and lengths[first] <= MOST_APART * lengths[first - 1]:
        first -= 1
    while last < len(lengths) - 1 and lengths[last + 1] <= MOST_APART * lengths[last]:
        last += 1
    if long > (MOST_APART if last - first > 1 else TWO_APART) * short:
        # At least one length between the two, and none more than `MOST_APART` times the one before.
        parts = max(2, math.ceil(math.log(long / short, MOST_APART)))
        between = [math.ceil(short * (long / short) ** (part / parts)) for part in range(1, parts)]
        raise NoRatioError(
            f"it reaches that loss in {short / steps:.2f} to {long / steps:.2f} times the tokens, and those "
            "two lengths are too far apart to say where between them",
            lengths=sorted({*lengths, *between}),
        )
    return lengths[first : last + 1]


def _curves(places: np.ndarray, tried: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
    """The estimate between the places and the bounds of the curve there, each (tried, seeds).

    Args:
        places: logarithms of the lengths.
        tried: where to read the curves off.
        values: at the places: (places, seeds).
    """
    count = len(places)
    index = np.clip(np.searchsorted(places, tried) - 1, 0, count - 2)

    def line(first: np.ndarray, at: np.ndarray, over: np.ndarray) -> np.ndarray:
        share = (at - over[first]) / (over[first + 1] - over[first])
        return np.asarray(values[first] + share[:, None] * (values[first + 1] - values[first]))

    chord = line(index, tried, places)
    if count == 2:
        bends = (line(index, np.exp(bend * tried), np.exp(bend * places)) for bend in (_BEND, -_BEND))
        return [chord, chord, *bends]
    left, right = places[index], places[index + 1]
    share = ((tried - left) / (right - left))[:, None]
    has_before, has_after = index > 0, index < count - 2
    before, after = np.maximum(index - 1, 0), np.minimum(index + 1, count - 2)
    # How far the neighbouring chords are from this one; zero where there is none.
    from_before = np.where(has_before[:, None], line(before, tried, places) - chord, 0.0)
    from_after = np.where(has_after[:, None], line(after, tried, places) - chord, 0.0)
    # Newton's form of the parabola through three places; of two parabolas the mean in proportion.
    bent_before = from_before * ((right - tried) / (right - places[before]))[:, None]
    bent_after = from_after * ((tried - left) / (places[after + 1] - left))[:, None]
    both = (has_before & has_after)[:, None]
    estimate = chord + np.where(both, 1 - share, 1) * bent_before + np.where(both, share, 1) * bent_after
    # Where both are on one side of the chord, the nearer one is the bound.
    of_before, of_after = from_before.mean(axis=1), from_after.mean(axis=1)
    same = of_before * of_after > 0
    nearer = np.abs(of_before) < np.abs(of_after)
    bound_before = np.where((same & ~nearer)[:, None], 0.0, from_before)
    bound_after = np.where((same & nearer)[:, None], 0.0, from_after)
    return [estimate, chord, chord + bound_before, chord + bound_after]


def _last_zero(tried: np.ndarray, values: np.ndarray) -> float:
    """Where values fall to zero for the last time; the middle if they do not."""
    crossings = np.flatnonzero((values[:-1] >= 0) & (values[1:] <= 0) & (values[:-1] > values[1:]))
    if not crossings.size:
        return float(tried[len(tried) // 2])
    last = int(crossings[-1])
    share = values[last] / (values[last] - values[last + 1])
    return float(tried[last] + share * (tried[last + 1] - tried[last]))


def _range(tried: np.ndarray, outside: np.ndarray, middle: float) -> tuple[float, float]:
    """From the first to the last of `tried` that is not outside; `middle` twice if all are."""
    inside = np.flatnonzero(outside <= 0)
    if not inside.size:
        return middle, middle
    ends = []
    for end, step in ((int(inside[0]), -1), (int(inside[-1]), 1)):
        if not 0 <= end + step < len(tried):
            ends.append(float(tried[end]))
            continue
        share = -outside[end] / (outside[end + step] - outside[end])
        ends.append(float(tried[end] + share * (tried[end + step] - tried[end])))
    return ends[0], ends[1]
