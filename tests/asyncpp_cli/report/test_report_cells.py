"""Cells: which runs are averaged, which cell is compared with which, and a cell's numbers beside others'."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from scipy import stats
from support import report_experiment
from support.report_experiment import charts_of_cells, settings
from support.rows import segment

from asyncpp_cli.planner.costs.devices import peak_tflops
from asyncpp_cli.report.analysis.aggregate import aggregate, aggregate_best
from asyncpp_cli.report.analysis.cells import CellResult
from asyncpp_cli.report.analysis.statistics import spread
from asyncpp_cli.report.analysis.summary import summary_lines
from asyncpp_cli.report.load.checks import Prediction
from asyncpp_cli.report.load.experiments import utilisation
from asyncpp_cli.report.load.measure import measure
from asyncpp_cli.report.load.metrics_rows import by_kind
from asyncpp_cli.report.load.run import RunResult
from asyncpp_cli.report.tables.columns import NOT_REACHED, measured_columns, records, value_columns
from asyncpp_cli.report.tables.document import table_of_cells
from asyncpp_cli.runs.settings import with_settings
from stages.config.run_config import RunConfig
from stages.rows import Evaluation, Experts, Segment, Start

LR = "optimizer.lr"


def run(
    schedule: str, loss: float | None = 3.0, *named: Any, speed: float | None = None, **further: Any
) -> RunResult:
    """A run's result, without a speed unless one is given."""
    return report_experiment.run(schedule, *named, loss=loss, speed=speed, **further)


def seeds(schedule: str, *losses: float, **further: Any) -> list[RunResult]:
    return [run(schedule, loss, seed=seed, **further) for seed, loss in enumerate(losses)]


def last(*runs: RunResult) -> CellResult:
    return aggregate(runs)[0][-1]


def said_of(*runs: RunResult) -> str:
    return " ".join(summary_lines(aggregate(runs)[0]))


def text(cell: CellResult, key: str) -> str:
    [column] = [column for column in measured_columns([cell]) if column.key == key]
    return column.text(cell)


@pytest.mark.parametrize(
    ("values", "mean", "deviation"),
    [
        ([2.0, 4.0, 9.0], 5.0, math.sqrt((9 + 1 + 16) / 2)),
        ([None, 2.5], 2.5, None),
        # A seed that diverged makes the mean not finite.
        ([1.0, math.nan], math.nan, math.nan),
        ([1.0, math.inf], math.inf, math.nan),
        ([-math.inf, math.inf], math.nan, math.nan),
    ],
)
def test_mean_and_sample_deviation(values: list[float], mean: float, deviation: float | None) -> None:
    found = spread(values)
    expected = pytest.approx((mean, deviation), rel=1e-15, nan_ok=True) if deviation else (mean, deviation)
    assert (found.mean, found.std) == expected
    assert found.n == len([value for value in values if value is not None])
    assert spread([None]) is None


@pytest.mark.parametrize(("delay", "mismatch", "synchronous"), [(0, 0, True), (1, 0, False), (0, 1, False)])
def test_a_schedule_of_the_users_own_is_synchronous_if_no_run_measured_a_delay(
    delay: int, mismatch: int, synchronous: bool
) -> None:
    of_first, of_second = {"delay": 0, "mismatch": 0}, {"delay": delay, "mismatch": mismatch}
    runs = [run("my:own", measured=of_first), run("my:own", seed=1, measured=of_second)]
    assert last(*runs).synchronous == synchronous


def test_runs_that_differ_in_more_than_seed_and_site_are_not_averaged_and_the_keys_are_named() -> None:
    [cell], notes = aggregate([run("1f1b", 3.0), run("1f1b", 3.2, seed=1, **{"site.threads": 4})])
    assert (cell.val_loss.mean, cell.n, notes) == (pytest.approx(3.1), 2, [])
    other = run("1f1b", seed=1, **{"train.eval_interval": 7, LR: 1e-3})
    cells, [note] = aggregate([run("1f1b"), other])
    assert [(cell.n, cell.axes["train.eval_interval"]) for cell in cells] == [(1, None), (1, 7)]
    assert f"{LR}, train.eval_interval" in note
    # Axes of the template are columns without a note.
    cells, notes = aggregate([run("1f1b", axes={LR: rate}, **{LR: rate}) for rate in (1e-3, 2e-3)])
    assert ([cell.axes for cell in cells], notes) == ([{LR: 1e-3}, {LR: 2e-3}], [])


@pytest.mark.parametrize(
    ("runs", "gaps"),
    [
        ([run("1f1b", 3.0), run("2bw", 3.25)], [None, 0.25]),
        # Error feedback is compared with the same optimizer without it.
        (
            [
                *(run("1f1b", 3.5, "adamw"), run("1f1b", 3.0)),
                *(run("2bw", 3.75, "adamw", 1.0), run("2bw", 3.125, "muon", 0.5)),
            ],
            [None, None, 0.25, 0.125],
        ),
        # 1F1B is preferred to other synchronous schedules.
        ([run("gpipe", 2.0), run("1f1b", 3.0), run("2bw", 4.0)], [-1.0, None, 1.0]),
        ([run("2bw", 4.0), run("gpipe", 2.5)], [1.5, None]),
        # The delay that was asked for is part of the schedule; nothing else is.
        ([run("1f1b", 3.0), run("2bw", 4.0, **{"schedule.delay": 2})], [None, 1.0]),
        *(
            ([run("1f1b"), run("2bw", **{key: 64})], [None, None])
            for key in ("schedule.microbatches", LR, "train.steps", "model.width")
        ),
    ],
)
def test_a_gap_is_that_to_the_synchronous_cell_of_the_same_settings(
    runs: list[RunResult], gaps: list[float | None]
) -> None:
    cells, _ = aggregate(runs)
    assert [cell.gap for cell in cells] == gaps
    assert [cell.baseline is None for cell in cells] == [gap is None for gap in gaps]


def test_only_completed_runs_are_averaged_and_the_worst_state_is_shown() -> None:
    runs = [run("1f1b", 3.0), run("1f1b", 9.0, seed=1, state="running")]
    cell = last(*runs)
    assert (cell.n, cell.state, cell.val_loss.mean) == (1, "running", 3.0)
    assert last(*runs, run("1f1b", seed=2, state="failed")).state == "failed"


def test_a_run_without_configuration_joins_the_cell_of_its_axes() -> None:
    axes = {"schedule": "1f1b", "optimizer": "muon", "error_feedback": 0.0, "model": "nano"}
    whole = run("1f1b", axes=axes | {"seed": 0})
    lost = RunResult(id="lost", axes=axes | {"seed": 1}, config=None, state="missing")
    for runs in ([whole, lost], [lost, whole]):
        [cell], _ = aggregate(runs)
        assert (cell.n, len(cell.runs), cell.state) == (1, 2, "missing")
    assert (last(lost).schedule, last(lost).optimizer, last(lost).model) == ("1f1b", "muon", "nano")


def timed(schedule: str, *rates: float, seed: int = 0) -> RunResult:
    """A run of 2 stages and 2 micro-batches whose segments had these tokens per second."""
    measured = {"tokens_per_second_by_segment": rates}
    found = run(schedule, seed=seed, speed=sum(rates) / len(rates), measured=measured)
    return replace(found, prediction=Prediction(1 / 3 if schedule == "1f1b" else 0.0, None, ()))


def test_speed_has_an_interval_over_segments_and_from_two_seeds_over_pairs() -> None:
    [sync, delayed], _ = aggregate([timed("1f1b", 990.0, 1010.0), timed("2bw", 1290.0, 1310.0)])
    assert (sync.throughput_ratio, delayed.throughput_ratio) == (None, 1.3)
    assert sync.speed_deviation == pytest.approx(math.sqrt(200))
    assert delayed.throughput_interval.low < 1.3 < delayed.throughput_interval.high
    # Drift that both arms of a seed share cancels: the ratios are 1.3 at both.
    runs = [timed("1f1b", 1000.0), timed("1f1b", 500.0, seed=1)]
    both = last(*runs, timed("2bw", 1300.0), timed("2bw", 650.0, seed=1))
    assert both.throughput_interval.half_width == pytest.approx(0.0, abs=1e-12)
    assert last(timed("1f1b", 1000.0), timed("2bw", 1300.0)).throughput_interval is None
    # The ratio is over the seeds that its interval is over.
    more = last(*runs, *(timed("2bw", rate, seed=seed) for seed, rate in enumerate((1300.0, 650.0, 9000.0))))
    assert (more.throughput_ratio, more.throughput_interval.high) == (1.3, pytest.approx(1.3))


def test_an_interval_over_segments_of_different_lengths_is_around_the_speed() -> None:
    """A long segment may be slower than many short ones."""
    rates = {"tokens_per_second_by_segment": (500.0, *[1000.0] * 9)}
    sync, delayed = aggregate([run("1f1b", speed=600.0, measured=rates), timed("2bw", 900.0, 900.0)])[0]
    assert sync.speed_interval.low < 600 < sync.speed_interval.high
    assert delayed.throughput_interval.low < 1.5 < delayed.throughput_interval.high


def test_a_speed_of_equal_segments_is_inside_its_interval() -> None:
    cells, _ = aggregate([timed("1f1b", 500.0, 500.0), timed("2bw", 700.0, 700.0)])
    assert [(row.below, row.above) for row in charts_of_cells(cells)["throughput"].rows] == [(0, 0)] * 2
    found = cells[1].throughput_interval
    assert found.low <= cells[1].throughput_ratio <= found.high


def test_a_run_without_a_speed_is_no_run_of_speed_zero() -> None:
    cell = last(run("1f1b", speed=990.0), run("1f1b", speed=1010.0, seed=1), run("1f1b", seed=2))
    assert cell.tokens_per_second.mean == pytest.approx(1000.0)
    assert cell.speed_interval.low * cell.speed_interval.high == pytest.approx(1000.0**2)


def test_two_seeds_of_unlike_speed_say_nothing_and_no_interval_is_below_zero() -> None:
    """On a busy machine: a half-width around 4.63 would be in the millions, and a speed's below zero."""
    runs = [timed("1f1b", 1000.0), timed("1f1b", 100.0, seed=1)]
    cells, _ = aggregate([*runs, timed("2bw", 100.0), timed("2bw", 5000.0, seed=1)])
    [column] = value_columns("throughput_ratio", cells)
    assert column.text(cells[1]) == "cannot be told"
    assert cells[1].throughput_interval.high > 1e6
    assert all(0 < cell.speed_interval.low < cell.tokens_per_second.mean for cell in cells)
    chart = charts_of_cells(cells)["throughput"]
    assert [(row.below, row.above) for row in chart.rows] == [(None, None)] * 2
    assert chart.rows[1].texts == ["ratio cannot be told"]
    said = " ".join(summary_lines(cells))
    assert "its interval spans more than a factor of 4" in said
    assert not re.search(r"\d{5,}\.", said)
    legend = table_of_cells(cells).legend
    assert '"cannot be told": it spans more than a factor of 4' in legend


@pytest.mark.parametrize(
    ("sync", "delayed", "marked"),
    [
        *(([1000.0], [1400.0], False), ([1000.0], [1499.0], False)),
        *(([1000.0], [1510.0], True), ([1000.0], [1860.0], True)),
        ([800.0, 1200.0], [1300.0, 1900.0], False),  # may be chance
    ],
)
def test_a_speed_above_what_the_bubble_allows_is_marked_with_the_reason(
    sync: list[float], delayed: list[float], marked: bool
) -> None:
    cells, _ = aggregate([timed("1f1b", *sync), timed("2bw", *delayed)])
    assert cells[1].throughput_bound == pytest.approx(1.5)
    assert [cell.is_too_fast for cell in cells] == [False, marked]
    [column] = value_columns("throughput_ratio", cells)
    # Two segments as far apart say nothing.
    ratio = f"{cells[1].throughput_ratio:.2f}" if len(sync) == 1 else "cannot be told"
    assert column.text(cells[1]).startswith(ratio)
    assert ("(max 1.50)" in column.text(cells[1])) == marked
    assert any("at most 1.50 times as fast as 1f1b" in line for line in summary_lines(cells[1:])) == marked


def test_the_gap_has_the_intervals_of_scipy() -> None:
    sync, delayed = (2.00, 2.03, 1.98), (2.10, 2.16, 2.07)
    shown = records([last(*seeds("1f1b", *sync), *seeds("2bw", *delayed))])[0]
    together = stats.ttest_rel(delayed, sync).confidence_interval(0.95)
    apart = stats.ttest_ind(delayed, sync, equal_var=False).confidence_interval(0.95)
    assert (shown["gap_low"], shown["gap_high"]) == pytest.approx(tuple(together), rel=1e-9)
    assert (shown["gap_welch_low"], shown["gap_welch_high"]) == pytest.approx(tuple(apart), rel=1e-9)
    assert last(*seeds("1f1b", 2.0), *seeds("2bw", 2.1)).gap_pairs.interval is None
    # Seeds whose losses differ by far more than the delay costs, and the cost hardly at all.
    told = [*seeds("1f1b", 1.955, 2.000, 2.026), *seeds("2bw", 1.9961, 2.0413, 2.0666)]
    assert text(last(*told), "gap") == "+0.041±0.001"
    assert "Not distinguishable" not in said_of(*told)


def test_a_gap_is_over_the_seeds_that_both_arms_have() -> None:
    """The third seed of the delayed arm is an easy one; in its mean it would hide the cost."""
    runs = [*seeds("1f1b", 2.0, 2.2), *seeds("2bw", 2.1, 2.3, 1.0)]
    [shown] = records([last(*runs)])
    assert (shown["gap"], shown["gap_seeds"], shown["gap_seeds_missing"]) == (pytest.approx(0.1), [0, 1], [2])
    assert text(last(*runs), "gap").endswith("(n 2)")
    assert "over the seeds of both arms: 2bw muon without seed 2." in said_of(*runs)
    apart = [*seeds("1f1b", 2.0, 2.1), run("2bw", 2.1, seed=5), run("2bw", 2.2, seed=6)]
    assert last(*apart).gap is None
    assert "2bw muon without seed 0, 1, 5, 6, so without a gap." in said_of(*apart)


def test_a_correction_recovers_its_share_of_the_gap() -> None:
    runs = [run("1f1b", 2.0), run("2bw", 2.4), run("2bw", 2.1, error_feedback=1.0)]
    assert [cell.recovered for cell in aggregate(runs)[0]] == [None, None, pytest.approx(0.75)]
    other = run("2bw", 2.2, **{"correction.name": "weight-prediction"})
    assert last(*runs, other).recovered == pytest.approx(0.5)
    # Over the seeds that all three cells have.
    runs = [*seeds("1f1b", 2.0, 2.0), *seeds("2bw", 2.4, 2.41, 9.0)]
    corrected = [run("2bw", loss, seed=seed, error_feedback=1.0) for seed, loss in ((0, 2.1), (2, 1.0))]
    assert last(*runs, *corrected).recovered == pytest.approx(0.75)


def test_losses_that_are_infinite_in_either_arm_leave_no_gap() -> None:
    cell = last(*seeds("1f1b", 2.0, math.inf), *seeds("2bw", math.inf, 2.0))
    assert records([cell])[0]["gap"] is None
    assert cell.gap_pairs.interval is None


def test_more_updates_on_the_same_tokens_are_said() -> None:
    eight = {"schedule.microbatches": 8}
    runs = [run("1f1b", 2.5, **eight), run("pipedream", 2.145, **eight, **{"schedule.update_interval": 1})]
    assert (last(*runs).update_ratio, text(last(*runs), "update_ratio")) == (8, "8")
    assert "of muon by -0.355 with 8 times the updates" in said_of(*runs)
    assert "Not like with like: on the same tokens pipedream makes 8 times the updates" in said_of(*runs)
    assert "updates" not in said_of(*seeds("1f1b", 2.0), *seeds("2bw", 2.1))


def test_no_share_is_named_of_a_gap_that_may_be_nothing() -> None:
    noisy = [*seeds("1f1b", 2.0, 2.2), *seeds("2bw", 2.25, 2.05)]
    assert last(*noisy, *seeds("2bw", 2.0, 2.1, error_feedback=1.0)).recovered is None
    clear = [*seeds("1f1b", 2.0, 2.01), *seeds("2bw", 2.4, 2.41)]
    assert last(*clear, *seeds("2bw", 2.2, 2.21, error_feedback=1.0)).recovered == pytest.approx(0.5)
    assert "Not distinguishable from zero: 2bw muon." in said_of(*noisy)
    assert "Not distinguishable" not in said_of(*clear)


def test_perplexity_is_the_mean_over_seeds_of_its_exponential() -> None:
    [shown] = records([last(*seeds("1f1b", 2.0, 3.0))])
    assert shown["perplexity"] == pytest.approx((math.exp(2) + math.exp(3)) / 2)
    assert text(last(*seeds("1f1b", 5000.0)), "perplexity") == "inf"


def reaching(schedule: str, *points: tuple[int, float], seed: int = 0, **measured: Any) -> RunResult:
    """A run that was evaluated at these steps."""
    evaluations = tuple(
        Evaluation(step=step, tokens=100 * step, seconds=0.5 * step, val_loss=loss) for step, loss in points
    )
    return run(schedule, points[-1][1], seed=seed, measured={"evaluations": evaluations} | measured)


def with_target(*runs: RunResult) -> list[CellResult]:
    return aggregate_best(runs, target=2.0)[0]


def test_the_way_to_a_target_ends_at_the_first_evaluation_at_or_below_it() -> None:
    sync, delayed = with_target(
        reaching("1f1b", (10, 3.0), (20, 2.1), (30, 2.0), (40, 1.9)),
        reaching("2bw", (10, 2.5), (20, 1.9), (30, 2.1), (40, 1.9)),
    )
    assert (sync.reached.steps.mean, sync.reached.tokens.mean) == (30, 3000)
    assert (delayed.time_to_target_ratio, text(delayed, "target_seconds")) == (1.5, "10.0")


@pytest.mark.parametrize(
    ("runs", "steps", "seconds"),
    [
        ([reaching("1f1b", (10, 2.1))], NOT_REACHED, NOT_REACHED),
        ([reaching("1f1b", (10, 2.1)), reaching("1f1b", (10, 1.9), seed=1)], "1/2 reached", "1/2 reached"),
        ([run("1f1b", None, state="pending")], "-", "-"),
        # A replay takes no time.
        ([reaching("1f1b", (10, 1.9), start=Start(step=0, replayed=True))], "10", "-"),
    ],
)
def test_what_is_shown_of_a_target(runs: list[RunResult], steps: str, seconds: str) -> None:
    [cell] = with_target(*runs)
    assert (text(cell, "target_steps"), text(cell, "target_seconds")) == (steps, seconds)


FOR_FLOPS = settings("2bw", "muon") | {"model.vocab_size": 100, "data.context": 64}


RANKS = {"parallel.stages": 4}


def test_utilisation_of_a_mixture_counts_the_experts_that_a_token_meets() -> None:
    config = RunConfig()
    experts = {"experts": 16, "active_experts": 3, "expert_width": 96, "shared_experts": 1, "dense_layers": 1}
    of_model = {f"model.{key}": value for key, value in experts.items()}
    config = with_settings(config, FOR_FLOPS | RANKS | of_model | {"site.peak_tflops": 1.0})
    attention = 2 * 128 * 128 + 2 * 128 * 64 + 2 * 128
    dense, routed = 3 * 128 * 384, (3 + 1) * 3 * 128 * 96 + 16 * 128
    needed = 6 * (4 * attention + dense + 3 * routed + 128 + 100 * 128) + 12 * 4 * 128 * 64
    measured = utilisation(config, run("1f1b", speed=1e3, measured={"start": Start(step=0, device="any")}))
    assert measured == pytest.approx(1e3 * needed / 4e12)


def test_utilisation_is_the_arithmetic_of_the_model_over_the_peak() -> None:
    config = RunConfig()
    config = with_settings(config, FOR_FLOPS | RANKS | {"train.precision": "bfloat16"})
    block = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384 + 2 * 128
    # 6 x (parameters without the embedding) + 12 x layers x width x context, a token
    needed = 6 * (4 * block + 128 + 100 * 128) + 12 * 4 * 128 * 64

    def of(start: dict[str, Any] | None, *, tflops: float | None = None, **model: Any) -> float | None:
        changed = replace(config, site=replace(config.site, peak_tflops=tflops))
        changed = replace(changed, model=replace(config.model, **model))
        return utilisation(changed, run("1f1b", speed=1e6, measured={"start": start}))

    start = Start(step=0, device="NVIDIA H100 80GB HBM3")
    assert of(start) == pytest.approx(1e6 * needed / (4 * 989.4e12))
    assert of(start, tflops=100.0) == pytest.approx(1e6 * needed / (4 * 100e12))
    unknown = [of(start, factory="package.module:make"), of(start, family="of-a-later-version")]
    assert [*unknown, of(Start(step=0, device="cpu")), of(Start(step=0)), of(None)] == [None] * 5


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        *(("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA A100-SXM4-80GB", 312.0)),
        *(("NVIDIA H200", 989.4), ("NVIDIA L4", 121.0), ("NVIDIA L40", None), ("cpu", None)),
    ],
)
def test_peaks_go_by_whole_words_of_the_name(device: str, peak: float | None) -> None:
    assert peak_tflops(device, "bfloat16") == peak


def test_memory_and_ranks_are_shown_where_they_are_known() -> None:
    gib = 2.0**30
    known = last(run("2bw", speed=800.0, measured={"peak_memory": (2 * gib, 3.5 * gib)}))
    assert text(known, "peak_memory_max") == "2.00 to 3.50"
    assert text(last(run("2bw")), "peak_memory_max") == "-"
    wide = run("2bw", speed=800.0, **{"parallel.stages": 4, "parallel.data": 2})
    assert text(last(wide), "tokens_per_second_per_rank") == "100"


def test_the_load_of_experts_is_that_of_the_last_segment() -> None:
    def loaded(*largest: float) -> Segment:
        load = {"blocks": [1, 2], "entropy": [0.9, 0.8], "never_chosen": [0, 3]}
        return segment(experts=Experts(max_over_mean=[*largest], **load))

    measured = measure(by_kind([loaded(4.0, 4.0), loaded(1.5, 2.5)]))
    other = measure(by_kind([loaded(1.5, 3.5)]))
    assert (measured.load_max_over_mean, measured.load_entropy) == (2.5, 0.8)
    assert measured.experts_never_chosen == 3
    loads = [replace(load, val_loss=2.0) for load in (measured, other)]
    cell = last(*(replace(run("2bw", seed=seed), **vars(load)) for seed, load in enumerate(loads)))
    assert (text(cell, "load_max_over_mean"), cell.load_by_block) == ("3.00±6.35", [1.5, 3.0])
    assert records([cell])[0]["experts_never_chosen"] == 3
    assert text(last(run("2bw", 2.0)), "load_max_over_mean") == "-"
    assert measure(by_kind([])).load_by_block == ()


def tried(schedule: str, losses: dict[float, float | None], *, seed: int = 0) -> list[RunResult]:
    """A run for each learning rate; one without a loss has not completed."""
    runs = []
    for rate, loss in losses.items():
        named = {"id": f"{schedule}-{rate}-{seed}", "axes": {LR: rate}, LR: rate}
        state = "failed" if loss is None else "completed"
        runs.append(run(schedule, loss, seed=seed, state=state, **named))
    return runs


@pytest.mark.parametrize(
    ("runs", "kept", "said", "unsaid"),
    [
        (  # Each arm keeps its own best.
            [
                *tried("1f1b", {1e-3: 2.3, 2e-3: 2.0, 4e-3: 2.2}),
                *tried("2bw", {1e-3: 2.1, 2e-3: 2.4, 4e-3: 2.9}),
            ],
            [("1f1b", 2e-3, 1), ("2bw", 1e-3, 1)],
            [
                "Best optimizer.lr of 0.001, 0.002, 0.004",
                *("1f1b muon 0.002; 2bw muon 0.001 (on the edge).", "a better optimizer.lr may lie beyond"),
            ],
            "had no choice",
        ),
        (  # The mean over seeds decides.
            [*tried("1f1b", {1e-3: 2.0, 2e-3: 1.9}), *tried("1f1b", {1e-3: 2.0, 2e-3: 2.5}, seed=1)],
            [("1f1b", 1e-3, 2)],
            [],
            "n = 1 to 2",
        ),
        (  # Values that diverged or failed do not win, and are counted.
            tried("1f1b", {1e-3: 2.2, 2e-3: math.nan, 4e-3: None, 5e-4: 2.1}),
            [("1f1b", 5e-4, 1)],
            ["of 0.001, 0.0005 (2 more without a result)"],
            "had no choice",
        ),
        (  # An arm without a result keeps all its cells.
            [*tried("1f1b", {1e-3: 2.0, 2e-3: 2.1, 4e-3: 2.2}), *tried("2bw", {1e-3: None, 2e-3: None})],
            [("1f1b", 1e-3, 1), ("2bw", 1e-3, 0), ("2bw", 2e-3, 0)],
            [],
            "2bw",
        ),
        (tried("1f1b", {1e-3: 2.0}), [("1f1b", 1e-3, 1)], ["had no choice"], "edge"),
        (tried("1f1b", {1e-3: 2.0, 2e-3: 1.9, 4e-3: 2.1}), [("1f1b", 2e-3, 1)], [], "edge"),
        (
            [*tried("1f1b", {2e-3: 1.9}), *tried("2bw", {1e-3: 2.0}), *tried("2bw", {1e-3: 2.0}, seed=1)],
            [("1f1b", 2e-3, 1), ("2bw", 1e-3, 2)],
            ["n = 1 to 2"],
            "without a result",
        ),
    ],
)
def test_each_arm_keeps_its_best(
    runs: list[RunResult], kept: list[tuple[str, float, int]], said: list[str], unsaid: str
) -> None:
    cells, _, choices = aggregate_best(runs, best_over=[LR])
    assert [(cell.schedule, cell.axes[LR], cell.n) for cell in cells] == kept
    assert [words for words in said if words not in " ".join(choices)] == []
    assert unsaid not in " ".join(choices)


def test_an_arm_is_not_named_by_what_it_was_chosen_over() -> None:
    """A cell of fewer seeds that wins says so."""
    runs = [
        run(schedule, loss, optimizer=optimizer, error_feedback=coefficient, seed=seed)
        for schedule, optimizer, coefficient, loss, seeds in (
            *(("2bw", "adamw", 0.0, 2.5, 2), ("2bw", "muon", 0.0, 2.0, 1)),
            *(("2bw", "muon", 1.0, 1.9, 2), ("1f1b", "adamw", 0.0, 2.1, 2)),
        )
        for seed in range(seeds)
    ]

    def said(*keys: str) -> str:
        return " ".join(aggregate_best(runs, best_over=keys)[2])

    over_optimizer = said("optimizer")
    assert "2bw muon (the mean of 1, where another value has 2 runs)" in over_optimizer
    assert "2bw EF muon" in over_optimizer
    assert "adamw muon" not in over_optimizer
    assert "adamw 2bw EF" not in (over_schedule := said("schedule", "error_feedback"))
    assert "muon 2bw and 1" in over_schedule
    assert "adamw 1f1b and 0" in over_schedule
    assert ": 2bw and muon and 1 (on" in said("schedule", "optimizer", "error_feedback")


def test_an_arm_is_compared_with_the_other_arms_best_if_it_has_one() -> None:
    cells, _, _ = aggregate_best(
        [*tried("1f1b", {1e-3: 2.3, 2e-3: 2.0}), *tried("2bw", {1e-3: 2.1})], best_over=[LR]
    )
    assert cells[1].gap == pytest.approx(0.1)
    unfinished = [
        replace(each, config=each.config | {"train.steps": 9}) for each in tried("gpipe", {1: None})
    ]
    cells, _, choices = aggregate_best([*tried("1f1b", {1e-3: 2.3}), *unfinished], best_over=[LR])
    assert [cell.baseline for cell in cells] == [None, None]
    assert "different numbers of runs" not in " ".join(choices)
