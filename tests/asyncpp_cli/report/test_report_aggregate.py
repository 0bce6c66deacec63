"""Cells: which runs are averaged, with which statistics, and which cell is compared with which."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.report_experiment import run

from asyncpp_cli.report.analysis.aggregate import aggregate
from asyncpp_cli.report.analysis.statistics import spread
from asyncpp_cli.report.analysis.summary import summary_lines
from asyncpp_cli.report.load.run import RunResult
from asyncpp_cli.report.tables.columns import value_columns


def test_mean_and_sample_deviation_by_hand() -> None:
    of_three = spread([2.0, 4.0, 9.0])
    assert of_three is not None
    assert of_three.mean == 5.0
    assert of_three.std == pytest.approx(math.sqrt((9 + 1 + 16) / 2), rel=1e-15)
    assert of_three.n == 3


def test_one_value_has_no_deviation_and_none_has_no_mean() -> None:
    of_one = spread([None, 2.5])
    assert of_one is not None
    assert (of_one.mean, of_one.std, of_one.n) == (2.5, None, 1)
    assert spread([None]) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_diverged_seed_makes_the_mean_not_finite(bad: float) -> None:
    with_bad = spread([1.0, bad])
    assert with_bad is not None
    assert not math.isfinite(with_bad.mean)
    assert with_bad.std is not None
    assert not math.isfinite(with_bad.std)


@pytest.mark.parametrize(("delay", "mismatch", "synchronous"), [(0, 0, True), (1, 0, False), (0, 1, False)])
def test_a_schedule_of_the_users_own_is_synchronous_if_no_run_measured_a_delay(
    delay: int, mismatch: int, synchronous: bool
) -> None:
    runs = [run("my_schedules:mine", seed=seed) for seed in (0, 1)]
    measurement = replace(runs[0].measurement, delay=0, mismatch=0)
    runs[0] = replace(runs[0], measurement=measurement)
    runs[1] = replace(runs[1], measurement=replace(measurement, delay=delay, mismatch=mismatch))
    [cell], _ = aggregate(runs)
    assert cell.synchronous == synchronous


def test_seeds_are_averaged() -> None:
    [cell], notes = aggregate([run("1f1b", seed=seed, loss=loss) for seed, loss in ((0, 3.0), (1, 3.2))])
    assert cell.val_loss is not None
    assert (cell.val_loss.mean, cell.n) == (pytest.approx(3.1), 2)
    assert notes == []


def test_runs_that_differ_in_more_than_the_seed_are_not_averaged_and_the_keys_are_named() -> None:
    runs = [run("1f1b"), run("1f1b", seed=1, **{"train.eval_interval": 7, "optimizer.lr": 1e-3})]
    cells, [note] = aggregate(runs)
    assert [cell.n for cell in cells] == [1, 1]
    assert "optimizer.lr, train.eval_interval" in note
    assert [cell.axes["train.eval_interval"] for cell in cells] == [None, 7]


def test_site_settings_make_no_other_cell() -> None:
    [cell], notes = aggregate([run("1f1b"), run("1f1b", seed=1, **{"site.threads": 4})])
    assert (cell.n, notes) == (2, [])


def test_further_axes_of_the_template_are_columns_without_a_note() -> None:
    rates = (1e-3, 2e-3)
    runs = [run("1f1b", axes={"optimizer.lr": rate}, **{"optimizer.lr": rate}) for rate in rates]
    cells, notes = aggregate(runs)
    assert [cell.axes for cell in cells] == [{"optimizer.lr": rate} for rate in rates]
    assert notes == []


def test_gap_is_delayed_minus_synchronous_and_ratio_delayed_over_synchronous() -> None:
    [sync, delayed], _ = aggregate([run("1f1b", loss=3.0, speed=1000.0), run("2bw", loss=3.25, speed=1500.0)])
    assert delayed.gap == 0.25
    assert delayed.throughput_ratio == 1.5
    assert sync.gap is None
    assert sync.throughput_ratio is None


def test_error_feedback_is_compared_with_the_same_optimizer_without_it() -> None:
    runs = [
        run("1f1b", "adamw", loss=3.5),
        run("1f1b", "muon", loss=3.0),
        run("2bw", "adamw", 1.0, loss=3.75),
        run("2bw", "muon", 0.5, loss=3.125),
    ]
    cells, _ = aggregate(runs)
    assert [cell.gap for cell in cells] == [None, None, 0.25, 0.125]


def test_1f1b_is_the_preferred_baseline() -> None:
    cells, _ = aggregate([run("gpipe", loss=2.0), run("1f1b", loss=3.0), run("2bw", loss=4.0)])
    assert [cell.gap for cell in cells] == [-1.0, None, 1.0]


def test_without_1f1b_another_synchronous_schedule_is_the_baseline() -> None:
    cells, _ = aggregate([run("2bw", loss=4.0), run("gpipe", loss=2.5)])
    assert cells[0].gap == 1.5


@pytest.mark.parametrize("key", ["schedule.microbatches", "optimizer.lr", "train.steps", "model.width"])
def test_no_baseline_differs_in_anything_else(key: str) -> None:
    [_, delayed], _ = aggregate([run("1f1b"), run("2bw", **{key: 64})])
    assert delayed.baseline is None
    assert delayed.gap is None


def test_the_delay_asked_for_is_part_of_the_schedule() -> None:
    [_, delayed], _ = aggregate([run("1f1b", loss=3.0), run("2bw", loss=4.0, **{"schedule.delay": 2})])
    assert delayed.gap == 1.0


def test_only_completed_runs_are_averaged_and_the_worst_state_is_shown() -> None:
    runs = [run("1f1b", loss=3.0), run("1f1b", seed=1, loss=9.0, state="running")]
    [cell], _ = aggregate(runs)
    assert (cell.n, cell.state) == (1, "running")
    assert cell.val_loss is not None
    assert cell.val_loss.mean == 3.0
    [cell], _ = aggregate([*runs, run("1f1b", seed=2, state="failed")])
    assert cell.state == "failed"


def test_a_run_without_configuration_joins_the_cell_of_its_axes() -> None:
    axes = {"schedule": "1f1b", "optimizer": "muon", "error_feedback": 0.0, "model": "nano"}
    whole = run("1f1b", axes=axes | {"seed": 0})
    lost = RunResult(id="lost", axes=axes | {"seed": 1}, config=None, state="missing")
    for runs in ([whole, lost], [lost, whole]):
        [cell], _ = aggregate(runs)
        assert (cell.n, len(cell.runs), cell.state) == (1, 2, "missing")
    [alone], _ = aggregate([lost])
    assert (alone.schedule, alone.optimizer, alone.model) == ("1f1b", "muon", "nano")


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8), st.floats(-1e3, 1e3))
def test_deviation_does_not_move_with_the_values(values: list[float], shift: float) -> None:
    here, there = spread(values), spread([value + shift for value in values])
    assert here is not None
    assert there is not None
    assert here.std == pytest.approx(there.std, abs=1e-9)


def timed(schedule: str, *rates: float, seed: int = 0) -> RunResult:
    """A run of 2 stages and 2 micro-batches whose segments had these tokens per second."""
    speed = sum(rates) / len(rates)
    found = run(schedule, seed=seed, speed=speed)
    measured = replace(found.measurement, tokens_per_second_by_segment=rates)
    return replace(found, measurement=measured, bubble_predicted=1 / 3 if schedule == "1f1b" else 0.0)


def test_speed_has_an_interval_over_segments_and_from_two_seeds_over_pairs() -> None:
    [sync, delayed], _ = aggregate([timed("1f1b", 990.0, 1010.0), timed("2bw", 1290.0, 1310.0)])
    assert sync.speed_deviation == pytest.approx(math.sqrt(200))
    interval = delayed.throughput_interval
    assert interval is not None
    assert interval.low < 1.3 < interval.high
    # Drift that both arms of a seed share cancels: the ratios are 1.3 at both.
    runs = [timed("1f1b", 1000.0), timed("1f1b", 500.0, seed=1)]
    runs += [timed("2bw", 1300.0), timed("2bw", 650.0, seed=1)]
    [_, delayed], _ = aggregate(runs)
    assert delayed.throughput_interval is not None
    assert delayed.throughput_interval.half_width == pytest.approx(0.0, abs=1e-12)
    [_, alone], _ = aggregate([timed("1f1b", 1000.0), timed("2bw", 1300.0)])
    assert alone.throughput_interval is None


@pytest.mark.parametrize(
    ("speed", "marked"), [(1400.0, False), (1499.0, False), (1510.0, True), (1860.0, True)]
)
def test_a_speed_above_what_the_bubble_allows_is_marked_with_the_reason(speed: float, marked: bool) -> None:
    [sync, delayed], _ = aggregate([timed("1f1b", 1000.0), timed("2bw", speed)])
    assert delayed.throughput_bound == pytest.approx(1.5)
    assert (delayed.is_too_fast, sync.is_too_fast) == (marked, False)
    [column] = value_columns("throughput_ratio", [sync, delayed])
    assert column.text(delayed) == f"{speed / 1000:.2f}" + " (max 1.50)" * marked
    assert any("at most 1.50 times as fast as 1f1b" in line for line in summary_lines([delayed])) == marked


def test_a_speed_that_may_be_chance_is_not_marked() -> None:
    [_, delayed], _ = aggregate([timed("1f1b", 800.0, 1200.0), timed("2bw", 1300.0, 1900.0)])
    assert delayed.throughput_ratio == 1.6
    assert not delayed.is_too_fast
