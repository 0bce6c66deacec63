"""Thinned curves: few points, no extreme lost, means over all rows."""

from __future__ import annotations

import math

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from asyncpp_cli.report.formats.charts import band, curve, kept_indices
from asyncpp_cli.report.load.metrics_rows import STEP_SCHEMA

LOSSES = arrays.arrays(np.float64, st.integers(1, 60), elements=st.floats(0, 9) | st.just(math.nan))


def steps_of(losses: list[float]) -> pl.DataFrame:
    count = len(losses)
    steps = range(1, count + 1)
    constant = {"lr": [0.1] * count, "grad_norm": [None] * count, "skipped": [False] * count}
    counted = {"step": steps, "tokens": [2 * step for step in steps], "seconds": [step / 2 for step in steps]}
    return pl.DataFrame({"train_loss": losses, **constant, **counted}, schema=STEP_SCHEMA)


@given(LOSSES, st.integers(1, 20))
@pytest.mark.slow
def test_each_span_keeps_its_extremes_and_the_curve_its_ends(losses: np.ndarray, size: int) -> None:
    kept = kept_indices(losses, size)
    assert list(kept) == sorted(set(kept))
    assert {0, len(losses) - 1} <= set(kept)
    for begin in range(0, len(losses), size):
        span = losses[begin : begin + size]
        inside = losses[[place for place in kept if begin <= place < begin + size]]
        finite, kept_finite = span[np.isfinite(span)], inside[np.isfinite(inside)]
        if len(finite):
            assert (finite.min(), finite.max()) == (kept_finite.min(), kept_finite.max())
        assert np.isnan(span).any() == np.isnan(inside).any()
        assert len(inside) <= 5


def test_means_are_over_all_rows_of_a_bin() -> None:
    found = curve(steps_of([3.0, 1.0, 2.0]), most_bins=3)  # a short curve is whole
    assert (found.bin_size, found.losses.tolist(), found.steps.tolist()) == (1, [3.0, 1.0, 2.0], [1, 2, 3])
    assert found.mean_losses.tolist() == [3.0, 1.0, 2.0]
    found = curve(steps_of([4.0, 2.0, 1.0, 3.0, 5.0]), most_bins=3)
    assert (found.bin_size, found.mean_losses.tolist()) == (2, [3.0, 2.0, 5.0])
    assert found.mean_steps.tolist() == [1.5, 3.5, 5.0]


@pytest.mark.parametrize("count", [19, 20, 21, 10_000])
def test_a_single_spike_survives_any_thinning_to_as_few_bins_as_asked_for(count: int) -> None:
    losses = [2.0] * count
    losses[11], losses[3] = 9.0, math.nan
    found = curve(steps_of(losses), most_bins=20)
    assert len(found.mean_losses) <= 20
    assert len(found.losses) < 70
    assert (np.nanmax(found.losses), found.steps[np.nanargmax(found.losses)]) == (9.0, 12)
    assert np.isnan(found.losses).any()


def test_a_band_is_the_mean_and_the_deviation_where_all_curves_are() -> None:
    first = (np.array([1.0, 2.0, 3.0, 4.0]), np.array([5.0, 4.0, 3.0, 2.0]))
    # One step in two, begun earlier and ended later: at 2 it is 3.5 and at 3 it is 3.
    second = (np.array([1.5, 3.5, 5.5]), np.array([3.75, 2.75, 1.75]))
    found = band([first, second])
    assert found.x.tolist() == [2.0, 3.0, 4.0]
    assert found.mean.tolist() == pytest.approx([(4 + 3.5) / 2, (3 + 3) / 2, (2 + 2.5) / 2])
    assert found.std.tolist() == pytest.approx([0.5 / 2**0.5, 0.0, 0.5 / 2**0.5])
    assert band([first]) is None
    assert band([first, (np.array([9.0]), np.array([1.0]))]) is None
