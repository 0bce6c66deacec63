"""Thinned curves: few points, no extreme lost, means over all rows."""

from __future__ import annotations

import math

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from support.report_experiment import charts_of_cells, run

from asyncpp_cli.report.analysis.aggregate import aggregate_best
from asyncpp_cli.report.formats.charts import Chart, band, curve, kept_indices, loss_charts, styles
from asyncpp_cli.report.formats.plotly_charts import plotly_figure
from asyncpp_cli.report.load.metrics_rows import STEP_SCHEMA
from asyncpp_cli.report.load.run import RunResult
from stages.rows import Evaluation

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


def evaluated(schedule: str, optimizer: str, *losses: float, **further: float) -> RunResult:
    """A run with these validation losses at steps 1, 2, .."""
    evaluations = tuple(
        Evaluation(step=step, tokens=100 * step, val_loss=loss, seconds=1.0 * step)
        for step, loss in enumerate(losses, 1)
    )
    settings = {key.replace("_", ".", 1): value for key, value in further.items()}
    id_ = f"{schedule}-{optimizer}-{settings}"
    measured = {"evaluations": evaluations}
    return run(schedule, optimizer, loss=losses[-1], id=id_, axes=settings, measured=measured, **settings)


def charts_of(*runs: RunResult, best_over: tuple[str, ...] = ()) -> dict[str, Chart]:
    cells, _, _ = aggregate_best(runs, best_over=best_over)
    return loss_charts(cells) | charts_of_cells(cells)


def test_a_diverged_arm_leaves_the_range_of_the_others_at_an_arrow() -> None:
    kept = evaluated("1f1b", "muon", 4.0, 3.0, 2.0)
    rising = evaluated("2bw", "muon", 4.0, 50.0, 900.0)
    gone = evaluated("2bw", "adamw", 3.5, 3.0, math.nan)
    chart = charts_of(kept, rising, gone)["validation-loss"]
    assert chart.y_range == (pytest.approx(1.9), pytest.approx(4.1))
    # Where the straight line to the next point leaves the range, and where the last finite loss is.
    leaves = 100 + 100 * (chart.y_range[1] - 4) / (50 - 4)
    assert [line.diverged_at for line in chart.lines] == [None, pytest.approx(leaves), 200]
    layout = plotly_figure(chart)["layout"]
    arrows = [(arrow["x"], arrow["y"], arrow["name"]) for arrow in layout["annotations"]]
    assert arrows == [(pytest.approx(leaves), 1, "1"), (200, 1, "2")]
    assert charts_of(kept)["validation-loss"].y_range is None


def test_curves_that_coincide_have_different_widths() -> None:
    same = [evaluated(schedule, "muon", 4.0, 3.0, 2.0) for schedule in ("1f1b", "gpipe", "zero-bubble")]
    lines = charts_of(*same, evaluated("2bw", "muon", 4.0, 3.1, 2.1))["validation-loss"].lines
    assert [line.width for line in lines] == [6.5, 4.0, 1.5, 1.5]


RATES = {0.001: 3.0, 0.004: 2.5, 0.016: 2.8, 0.1: math.nan}


@pytest.mark.parametrize("best_over", [(), ("optimizer.lr",)])
def test_loss_over_a_rate_marks_the_best_and_where_runs_diverged(best_over: tuple[str, ...]) -> None:
    """Whether the report has all rates or the best one alone."""
    runs = [evaluated("1f1b", "muon", 4.0, loss, optimizer_lr=rate) for rate, loss in RATES.items()]
    drawn = charts_of(*runs, evaluated("2bw", "muon", 4.0, 3.9, optimizer_lr=0.004), best_over=best_over)
    chart = drawn["over-optimizer.lr"]
    [line] = chart.lines  # of 2bw there is one rate alone
    assert (line.name, list(line.x), list(line.y)) == ("1f1b muon", [*RATES], [3.0, 2.5, 2.8, None])
    assert (line.best, line.diverged_at, chart.logarithmic) == (1, 0.1, True)
    figure = plotly_figure(chart)
    assert figure["data"][0]["marker"]["size"] == [6, 13, 6, 6]
    assert figure["layout"]["annotations"][0]["x"] == pytest.approx(-1)  # of a logarithmic axis


def test_colours_are_schedules_and_dashes_optimizers() -> None:
    cells, _, _ = aggregate_best([run(*of) for of in (("1f1b", "muon"), ("1f1b", "adamw"), ("2bw", "muon"))])
    one, other_optimizer, other_schedule = styles(cells)
    assert one.colour == other_optimizer.colour != other_schedule.colour
    assert one.dash == other_schedule.dash != other_optimizer.dash


def test_of_many_cells_colours_are_still_schedules_and_dashes_optimizers() -> None:
    """More than there are styles: those that differ in a rate alone look the same."""
    arms = [(schedule, optimizer) for schedule in ("1f1b", "2bw") for optimizer in ("muon", "adamw")]
    rates = [0.001 * place for place in range(1, 11)]
    runs = [
        run(*arm, axes={"optimizer.lr": rate}, **{"optimizer.lr": rate}) for arm in arms for rate in rates
    ]
    cells, _, _ = aggregate_best(runs)
    colours = {cell.schedule: style.colour for cell, style in zip(cells, styles(cells), strict=True)}
    dashes = {cell.optimizer: style.dash for cell, style in zip(cells, styles(cells), strict=True)}
    assert (len(cells), len({*colours.values()}), len({*dashes.values()})) == (40, 2, 2)
    looks = [(style.colour, style.dash) for style in styles(cells)]
    assert looks == [(colours[cell.schedule], dashes[cell.optimizer]) for cell in cells]
