"""A cell's numbers beside other cells': intervals, shares, targets, utilisation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from scipy import stats
from support import report_experiment
from support.report_experiment import settings

from asyncpp_cli.planner.costs.devices import peak_tflops
from asyncpp_cli.report.analysis.aggregate import aggregate, aggregate_best
from asyncpp_cli.report.analysis.cells import CellResult
from asyncpp_cli.report.analysis.summary import summary_lines
from asyncpp_cli.report.load.experiments import utilisation
from asyncpp_cli.report.load.measure import Evaluation, Measurement, measure
from asyncpp_cli.report.load.metrics_rows import from_rows
from asyncpp_cli.report.load.run import RunResult
from asyncpp_cli.report.tables.columns import NOT_REACHED, measured_columns, records
from asyncpp_cli.runs.settings import assign
from stages.config.run_config import RunConfig


def run(
    schedule: str,
    loss: float | None,
    *,
    evaluations: tuple[Evaluation, ...] = (),
    measured: dict[str, Any] | None = None,
    **further: Any,
) -> RunResult:
    """Without a speed, unless it is measured."""
    measurement = Measurement(val_loss=loss, evaluations=evaluations, **(measured or {}))
    return replace(report_experiment.run(schedule, **further), measurement=measurement)


def seeds(schedule: str, *losses: float, **further: Any) -> list[RunResult]:
    return [run(schedule, loss, seed=seed, **further) for seed, loss in enumerate(losses)]


def last(*runs: RunResult) -> CellResult:
    return aggregate(runs)[0][-1]


def test_the_gap_has_the_intervals_of_scipy() -> None:
    sync, delayed = (2.00, 2.03, 1.98), (2.10, 2.16, 2.07)
    cell = last(*seeds("1f1b", *sync), *seeds("2bw", *delayed))
    together = stats.ttest_rel(delayed, sync).confidence_interval(0.95)
    apart = stats.ttest_ind(delayed, sync, equal_var=False).confidence_interval(0.95)
    assert cell.gap_interval is not None
    assert (cell.gap_interval.low, cell.gap_interval.high) == pytest.approx(tuple(together), rel=1e-9)
    shown = records([cell])[0]
    assert (shown["gap_low"], shown["gap_high"]) == pytest.approx(tuple(together), rel=1e-9)
    assert (shown["gap_welch_low"], shown["gap_welch_high"]) == pytest.approx(tuple(apart), rel=1e-9)


def test_a_gap_that_pairs_tell_from_zero_is_told() -> None:
    """Three seeds whose losses differ by far more than the delay costs, and the cost hardly at all."""
    sync, cost = (1.955, 2.000, 2.026), (0.0411, 0.0413, 0.0406)
    cells, _ = aggregate([*seeds("1f1b", *sync), *seeds("2bw", *map(sum, zip(sync, cost, strict=True)))])
    shown = records([cells[-1]])[0]
    assert (shown["gap_low"], shown["gap_high"]) == pytest.approx((0.0402, 0.0418), abs=1e-4)
    assert (shown["gap_welch_low"], shown["gap_welch_high"]) == pytest.approx((-0.040, 0.122), abs=1e-3)
    assert text(cells[-1], "gap") == "+0.041±0.001"
    assert "Not distinguishable" not in " ".join(summary_lines(cells))


def test_a_gap_is_over_the_seeds_that_both_arms_have() -> None:
    """The third seed of the delayed arm is an easy one; in its mean it would hide the cost."""
    cells, _ = aggregate([*seeds("1f1b", 2.0, 2.2), *seeds("2bw", 2.1, 2.3, 1.0)])
    cell = cells[-1]
    assert cell.gap == pytest.approx(0.1)
    assert (records([cell])[0]["gap_seeds"], records([cell])[0]["gap_seeds_missing"]) == ([0, 1], [2])
    assert text(cell, "gap").endswith("(n 2)")
    assert "over the seeds of both arms: 2bw muon without seed 2." in " ".join(summary_lines(cells))
    others = [run("2bw", 2.1, seed=5), run("2bw", 2.2, seed=6)]
    apart, _ = aggregate([*seeds("1f1b", 2.0, 2.1), *others])
    assert apart[-1].gap is None
    assert "2bw muon without seed 0, 1, 5, 6, so without a gap." in " ".join(summary_lines(apart))


def test_the_recovered_gap_is_over_seeds_common_to_all_three_cells() -> None:
    runs = [*seeds("1f1b", 2.0, 2.0), *seeds("2bw", 2.4, 2.41, 9.0)]
    corrected = [run("2bw", loss, seed=seed, error_feedback=1.0) for seed, loss in ((0, 2.1), (2, 1.0))]
    assert last(*runs, *corrected).recovered == pytest.approx(0.75)


def test_one_seed_has_no_interval() -> None:
    assert last(*seeds("1f1b", 2.0), *seeds("2bw", 2.1)).gap_interval is None


def test_more_updates_on_the_same_tokens_are_said() -> None:
    more = {"schedule.microbatches": 8, "schedule.update_interval": 1}
    cells, _ = aggregate(
        [*seeds("1f1b", 2.5, **{"schedule.microbatches": 8}), *seeds("pipedream", 2.145, **more)]
    )
    assert cells[-1].update_ratio == 8
    assert text(cells[-1], "update_ratio") == "8"
    said = " ".join(summary_lines(cells))
    assert "of muon by -0.355 with 8 times the updates" in said
    assert "Not like with like: on the same tokens pipedream makes 8 times the updates" in said
    alike = " ".join(summary_lines(aggregate([*seeds("1f1b", 2.0), *seeds("2bw", 2.1)])[0]))
    assert "updates" not in alike


def test_a_correction_recovers_its_share_of_the_gap() -> None:
    runs = [run("1f1b", 2.0), run("2bw", 2.4), run("2bw", 2.1, error_feedback=1.0)]
    cells, _ = aggregate(runs)
    assert [cell.recovered for cell in cells] == [None, None, pytest.approx(0.75)]
    other = run("2bw", 2.2, **{"correction.name": "weight-prediction"})
    assert last(*runs, other).recovered == pytest.approx(0.5)


def test_no_share_is_named_of_a_gap_that_may_be_nothing() -> None:
    noisy = [*seeds("1f1b", 2.0, 2.2), *seeds("2bw", 2.25, 2.05)]
    assert last(*noisy, *seeds("2bw", 2.0, 2.1, error_feedback=1.0)).recovered is None
    clear = [*seeds("1f1b", 2.0, 2.01), *seeds("2bw", 2.4, 2.41)]
    assert last(*clear, *seeds("2bw", 2.2, 2.21, error_feedback=1.0)).recovered == pytest.approx(0.5)
    words = " ".join(summary_lines(aggregate(noisy)[0]))
    assert "Not distinguishable from zero: 2bw muon." in words
    assert "Not distinguishable" not in " ".join(summary_lines(aggregate(clear)[0]))


def test_perplexity_is_the_mean_over_seeds_of_its_exponential() -> None:
    cell = last(*seeds("1f1b", 2.0, 3.0))
    assert cell.perplexity is not None
    assert cell.perplexity.mean == pytest.approx((math.exp(2) + math.exp(3)) / 2)
    blown = last(*seeds("1f1b", 5000.0))
    assert blown.perplexity is not None
    assert blown.perplexity.mean == math.inf


def reaching(*points: tuple[int, float]) -> tuple[Evaluation, ...]:
    return tuple(
        Evaluation(step=step, tokens=100 * step, seconds=0.5 * step, val_loss=loss) for step, loss in points
    )


def with_target(*runs: RunResult, target: float = 2.0) -> list[CellResult]:
    cells, _, _ = aggregate_best(runs, target=target)
    return cells


def text(cell: CellResult, key: str) -> str:
    [column] = [column for column in measured_columns([cell]) if column.key == key]
    return column.text(cell)


def test_the_way_to_a_target_ends_at_the_first_evaluation_at_or_below_it() -> None:
    slow = run("1f1b", 1.9, evaluations=reaching((10, 3.0), (20, 2.1), (30, 2.0), (40, 1.9)))
    quick = run("2bw", 1.9, evaluations=reaching((10, 2.5), (20, 1.9), (30, 2.1), (40, 1.9)))
    sync, delayed = with_target(slow, quick)
    assert sync.reached is not None
    assert sync.reached.steps is not None
    assert sync.reached.tokens is not None
    assert (sync.reached.steps.mean, sync.reached.tokens.mean) == (30, 3000)
    assert delayed.time_to_target_ratio == 1.5
    assert text(delayed, "target_seconds") == "10.0"


def test_a_target_that_was_not_reached_is_said_so() -> None:
    near = run("1f1b", 2.1, evaluations=reaching((10, 2.1)))
    there = run("1f1b", 1.9, seed=1, evaluations=reaching((10, 1.9)))
    assert text(with_target(near)[0], "target_steps") == NOT_REACHED
    assert text(with_target(near, there)[0], "target_steps") == "1/2 reached"
    assert text(with_target(run("1f1b", None, state="pending"))[0], "target_steps") == "-"


def test_a_replay_reaches_a_target_in_steps_but_in_no_time() -> None:
    replayed = run("1f1b", 1.9, evaluations=reaching((10, 1.9)), measured={"start": {"replayed": True}})
    [cell] = with_target(replayed)
    assert (text(cell, "target_steps"), text(cell, "target_seconds")) == ("10", "-")


def test_utilisation_of_a_mixture_counts_the_experts_that_a_token_meets() -> None:
    config = RunConfig()
    experts = {"experts": 16, "active_experts": 3, "expert_width": 96, "shared_experts": 1, "dense_layers": 1}
    further = {"model.vocab_size": 100, "data.context": 64, "site.peak_tflops": 1.0}
    assign(
        config, settings("2bw", "muon") | further | {f"model.{key}": value for key, value in experts.items()}
    )
    attention = 2 * 128 * 128 + 2 * 128 * 64 + 2 * 128
    dense, routed = 3 * 128 * 384, (3 + 1) * 3 * 128 * 96 + 16 * 128
    needed = 6 * (4 * attention + dense + 3 * routed + 128 + 100 * 128) + 12 * 4 * 128 * 64
    measured = utilisation(config, start={"device": "any"}, tokens_per_second=1e3, ranks=4)
    assert measured == pytest.approx(1e3 * needed / 4e12)


def test_utilisation_is_the_arithmetic_of_the_model_over_the_peak() -> None:
    config = RunConfig()
    further = {"model.vocab_size": 100, "data.context": 64, "train.precision": "bfloat16"}
    assign(config, settings("2bw", "muon") | further)
    block = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384 + 2 * 128
    # 6 x (parameters without the embedding) + 12 x layers x width x context, a token
    needed = 6 * (4 * block + 128 + 100 * 128) + 12 * 4 * 128 * 64
    start = {"device": "NVIDIA H100 80GB HBM3"}
    measured = utilisation(config, start=start, tokens_per_second=1e6, ranks=4)
    assert measured == pytest.approx(1e6 * needed / (4 * 989.4e12))
    named = replace(config, site=replace(config.site, peak_tflops=100.0))
    measured = utilisation(named, start=start, tokens_per_second=1e6, ranks=4)
    assert measured == pytest.approx(1e6 * needed / (4 * 100e12))
    for unknown in ({"factory": "package.module:make"}, {"family": "of-a-later-version"}):
        other = replace(config, model=replace(config.model, **unknown))
        assert utilisation(other, start=start, tokens_per_second=1e6, ranks=4) is None
    for no_start in ({"device": "cpu"}, {}, None):
        assert utilisation(config, start=no_start, tokens_per_second=1e6, ranks=4) is None


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40", None),
        ("cpu", None),
    ],
)
def test_peaks_go_by_whole_words_of_the_name(device: str, peak: float | None) -> None:
    assert peak_tflops(device, "bfloat16") == peak


def test_memory_and_ranks_are_shown_where_they_are_known() -> None:
    gib = 2.0**30
    known = run("2bw", 2.0, measured={"peak_memory": (2 * gib, 3.5 * gib), "tokens_per_second": 800.0})
    assert text(last(known), "peak_memory_max") == "2.00 to 3.50"
    assert text(last(run("2bw", 2.0)), "peak_memory_max") == "-"
    wide = run(
        "2bw", 2.0, measured={"tokens_per_second": 800.0}, **{"parallel.stages": 4, "parallel.data": 2}
    )
    assert last(wide).tokens_per_second_per_rank is not None
    assert text(last(wide), "tokens_per_second_per_rank") == "100"


def test_the_load_of_experts_is_that_of_the_last_segment() -> None:
    def segment(*largest: float) -> dict[str, Any]:
        load = {
            "blocks": [1, 2],
            "max_over_mean": list(largest),
            "entropy": [0.9, 0.8],
            "never_chosen": [0, 3],
        }
        row = {"kind": "segment", "steady_seconds": 0.0, "delay_max": [0], "mismatch_max": [0], "busy": []}
        return {**row, "first_step": 0, "steps": 2, "seconds": 1.0, "experts": load}

    measured = measure(from_rows([segment(4.0, 4.0), segment(1.5, 2.5)]))
    other = measure(from_rows([segment(1.5, 3.5)]))
    assert (measured.load_max_over_mean, measured.load_entropy) == (2.5, 0.8)
    assert measured.experts_never_chosen == 3
    runs = [
        replace(one, measurement=replace(load, val_loss=2.0))
        for one, load in zip(seeds("2bw", 2.0, 2.0), (measured, other), strict=True)
    ]
    cell = last(*runs)
    assert text(cell, "load_max_over_mean") == "3.00±0.71"
    assert cell.load_by_block == [1.5, 3.0]
    assert records([cell])[0]["experts_never_chosen"] == 3
    assert text(last(run("2bw", 2.0)), "load_max_over_mean") == "-"
    assert measure(from_rows([])).load_by_block == ()
