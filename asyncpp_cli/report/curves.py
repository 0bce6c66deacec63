"""The course of a run in few points, without losing its extremes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Training loss along a run, in the order of training.

    The first four are rows of the run itself: all of them, or of each bin of rows the first that has the
    least and the first that has the greatest loss, with the run's first and last. The others are means over
    the same bins.
    """

    steps: NDArray[np.int64]
    tokens: NDArray[np.int64]
    seconds: Floats
    losses: Floats
    mean_steps: Floats
    mean_losses: Floats
    bin_size: int
    """Rows of a bin; 1: nothing was left out."""


def curve(steps: pl.DataFrame, *, most_bins: int) -> Curve:
    """The training loss of `step` rows (see `rows.Metrics`), in at most `most_bins` bins of equal size."""
    losses = steps["train_loss"].to_numpy()
    size = max(1, -(-len(losses) // most_bins))
    kept = kept_places(losses, size)
    return Curve(
        steps=steps["step"].to_numpy()[kept],
        tokens=steps["tokens"].to_numpy()[kept],
        seconds=steps["seconds"].to_numpy()[kept],
        losses=losses[kept],
        mean_steps=_bin_means(steps["step"].to_numpy().astype(np.float64), size),
        mean_losses=_bin_means(losses, size),
        bin_size=size,
    )


@dataclass(frozen=True, kw_only=True)
class Band:
    """The mean of several curves and their standard deviation (n - 1), along one axis."""

    at: Floats
    mean: Floats
    std: Floats


def band(curves: Sequence[tuple[Floats, Floats]]) -> Band | None:
    """Mean and spread of curves, each given as places (ascending) and values.

    Taken at the places of the first curve that all of them reach, between their points by straight lines;
    None for fewer than two curves, or where they have no place in common.
    """
    if len(curves) < 2 or not all(len(places) for places, _ in curves):
        return None
    begin = max(places[0] for places, _ in curves)
    end = min(places[-1] for places, _ in curves)
    at = curves[0][0][(curves[0][0] >= begin) & (curves[0][0] <= end)]
    if not len(at):
        return None
    values = np.stack([np.interp(at, places, losses) for places, losses in curves])
    return Band(at=at, mean=values.mean(axis=0), std=values.std(axis=0, ddof=1))


def kept_places(values: Floats, size: int) -> Places:
    """Places of each bin's extremes, and of the first and last value, in order; all for bins of one.

    A bin with a value that is not finite keeps the first such one, too: a loss that blew up is an extreme.
    """
    count = len(values)
    if size == 1 or count == 0:
        return np.arange(count)
    kept: Sequence[int] = [0, count - 1]
    starts = np.arange(0, count, size)
    finite = np.isfinite(values)
    low = _padded(np.where(finite, values, np.inf), size, fill=np.inf).argmin(axis=1)
    high = _padded(np.where(finite, values, -np.inf), size, fill=-np.inf).argmax(axis=1)
    odd = _padded((~finite).astype(np.float64), size, fill=0.0)
    odd_bins = odd.any(axis=1)
    places = [kept, starts + low, starts + high, starts[odd_bins] + odd[odd_bins].argmax(axis=1)]
    return np.unique(np.concatenate(places)).astype(np.int64)


def _padded(values: Floats, size: int, *, fill: float) -> Floats:
    """The values in rows of `size`, the last one filled up."""
    missing = -len(values) % size
    return np.concatenate([values, np.full(missing, fill)]).reshape(-1, size)


def _bin_means(values: Floats, size: int) -> Floats:
    starts = np.arange(0, len(values), size)
    if not len(starts):
        return np.empty(0)
    counts = np.diff(np.append(starts, len(values)))
    return np.asarray(np.add.reduceat(values, starts) / counts, dtype=np.float64)
