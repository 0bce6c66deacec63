"""Curves of runs, thinned to few points without losing extremes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Training loss of a run, in the order of training.

    The first four fields hold rows of the run: all of them, or the first minimum and maximum of each bin with
    the run's first and last row. The means are over the same bins.
    """

    steps: NDArray[np.int64]
    tokens: NDArray[np.int64]
    seconds: Floats
    losses: Floats
    mean_steps: Floats
    mean_losses: Floats
    bin_size: int
    """Rows in a bin; 1: no row was left out."""


def curve(steps: pl.DataFrame, *, most_bins: int) -> Curve:
    """The training loss of `step` rows (`Metrics.steps`), in at most `most_bins` bins of equal size."""
    losses = steps["train_loss"].to_numpy()
    size = max(1, -(-len(losses) // most_bins))
    kept = kept_indices(losses, size)
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
    """Mean and standard deviation (n - 1) of several curves, along one axis."""

    x: Floats
    mean: Floats
    std: Floats


def band(curves: Sequence[tuple[Floats, Floats]]) -> Band | None:
    """Mean and standard deviation of curves, each given as x (ascending) and y.

    Linearly interpolated at the x of the first curve that all curves cover. None for fewer than two curves,
    or curves without common x.
    """
    if len(curves) < 2 or not all(len(x) for x, _ in curves):
        return None
    begin = max(x[0] for x, _ in curves)
    end = min(x[-1] for x, _ in curves)
    first, _ = curves[0]
    common = first[(first >= begin) & (first <= end)]
    if not len(common):
        return None
    values = np.stack([np.interp(common, x, y) for x, y in curves])
    return Band(x=common, mean=values.mean(axis=0), std=values.std(axis=0, ddof=1))


def kept_indices(values: Floats, size: int) -> Indices:
    """Indices of each bin's minimum and maximum and of the first and last value, sorted; all for size 1.

    A bin with values that are not finite keeps the first of them, too: a loss that diverged is an extreme.
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
    indices = [kept, starts + low, starts + high, starts[odd_bins] + odd[odd_bins].argmax(axis=1)]
    return np.unique(np.concatenate(indices)).astype(np.int64)


def _padded(values: Floats, size: int, *, fill: float) -> Floats:
    """The values in rows of `size`; the last row is padded with `fill`."""
    missing = -len(values) % size
    return np.concatenate([values, np.full(missing, fill)]).reshape(-1, size)


def _bin_means(values: Floats, size: int) -> Floats:
    starts = np.arange(0, len(values), size)
    if not len(starts):
        return np.empty(0)
    counts = np.diff(np.append(starts, len(values)))
    return np.asarray(np.add.reduceat(values, starts) / counts, dtype=np.float64)
