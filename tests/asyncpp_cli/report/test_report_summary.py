"""The sentences under the table say what the cells say, and no more."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
from support import report_experiment
from support.files import ROOT
from support.report_experiment import charts_of_cells
from support.rows import segment

from asyncpp_cli.experiment.matrix import expand
from asyncpp_cli.experiment.shipped import template_names
from asyncpp_cli.experiment.template import load
from asyncpp_cli.report.analysis.aggregate import aggregate
from asyncpp_cli.report.analysis.cells import CellResult, arm_names
from asyncpp_cli.report.analysis.conditions import CROWDED, conditions_lines
from asyncpp_cli.report.analysis.statistics import paired
from asyncpp_cli.report.analysis.summary import summary_lines
from asyncpp_cli.report.load.measure import Slowest, slowest
from asyncpp_cli.report.load.run import RunResult
from asyncpp_cli.report.tables.document import table_of_cells
from asyncpp_cli.runs.settings import items
from stages.rows import Start


def words_of(*runs: RunResult) -> str:
    return " ".join(summary_lines(aggregate(runs)[0]))


def run(
    schedule: str, *named: Any, loss: float = 2.0, tokens_per_parameter: float = 40.0, **further: Any
) -> RunResult:
    start = Start(step=0, parameters=1000, tokens_per_step=int(100 * tokens_per_parameter))
    measured = {"steps_done": 10, "bubble": further.pop("bubble", None), "start": start}
    return report_experiment.run(schedule, *named, loss=loss, measured=measured, **further)


def both(loss: float = 2.5, **further: Any) -> list[RunResult]:
    return [run("1f1b", **further), run("2bw", loss=loss, **further)]


def test_costs_of_each_optimizer_and_what_error_feedback_recovers() -> None:
    said = words_of(
        *(run("1f1b", "adamw"), run("1f1b", loss=1.5)),
        *(run("2bw", "adamw", loss=2.5), run("2bw", "adamw", 1.0, loss=2.125)),
        *(run("2bw", loss=1.625), run("2bw", "muon", 0.5, loss=1.75)),
    )
    assert "of adamw by +0.500, with error feedback by +0.125 (75% of the gap closed);" in said
    assert "of muon by +0.125, with error feedback (c = 0.5) by +0.250 (a wider gap)" in said
    # What is better is not said to cost.
    said = words_of(*both(1.9), run("2bw", "muon", 1.0, loss=1.95))
    assert "of muon by -0.100, with error feedback by -0.050." in said
    assert "closed" not in said


def test_speed_gives_the_range_over_the_pairs_and_the_waiting() -> None:
    said = words_of(
        *(run("1f1b", "adamw", bubble=0.31), run("1f1b", bubble=0.33)),
        *(run("2bw", "adamw", speed=1250.0, bubble=0.04), run("2bw", speed=1500.0, bubble=0.04)),
    )
    assert "2bw trains on 1.25 to 1.50 times as many tokens per second as 1f1b" in said
    assert "wait 4% of the time instead of 31% to 33%" in said


def test_sentences_name_the_synchronous_schedule_that_each_cell_is_compared_with() -> None:
    four = {"schedule.microbatches": 4}
    said = words_of(
        *(run("1f1b"), run("gpipe", speed=1100.0), run("2bw", speed=1300.0)),
        *(run("1f1b", speed=1200.0, **four), run("2bw", speed=1500.0, **four)),
    )
    assert "2bw trains on 1.18 times as many tokens per second as gpipe" in said
    assert "2bw trains on 1.25 times as many tokens per second as 1f1b" in said
    said = words_of(run("1f1b", "adamw"), run("gpipe"), run("2bw", "adamw"), run("2bw"))
    assert "against 1f1b, 2bw changes the validation loss (nats per token) of adamw by" in said
    assert "against gpipe, 2bw changes the validation loss (nats per token) of muon by" in said


def test_gaps_along_an_axis_are_not_mixed_with_those_of_another_form_of_error_feedback() -> None:
    runs = []
    for rate in (1e-4, 2e-4, 3e-4, 4e-4, 5e-4):
        axes = {"optimizer.lr": rate}
        runs += [run("1f1b", axes=axes, **axes), run("2bw", axes=axes, **axes)]
        for form in ("look-ahead", "buffered"):
            further = axes | {"error_feedback.form": form}
            runs.append(run("2bw", "muon", 1.0, loss=2.0 + (form == "buffered"), axes=further, **further))
    assert "Loss: 15 comparisons with a synchronous cell; see the gap column." in words_of(*runs)


def test_few_seeds_short_runs_and_models_are_named() -> None:
    assert [words_of(run("2bw")), words_of(run("1f1b"), run("gpipe")), words_of()] == [""] * 3
    assert "n = 1" in words_of(*both())
    three = words_of(*(each for seed in range(3) for each in both(seed=seed)))
    assert not re.search("n = |short run", three)
    assert "A short run (0.5 tokens per parameter" in words_of(*both(tokens_per_parameter=0.5))
    said = words_of(*both(), *both(2.25, **{"model.name": "micro"}))
    for model, gap in (("nano", "+0.500"), ("micro", "+0.250")):
        changes = f"changes the validation loss (nats per token) of muon by {gap}"
        assert f"Loss ({model}): against 1f1b, 2bw {changes}" in said


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        # Three arms, of two seeds each, whose intervals hold 1.
        (
            [(1100, 1400), (1050, 1300), (1000, 1600)],
            "Speed: the tokens per second of 2bw and 1f1b cannot be told apart: 1.18 to 1.30 times as many; "
            "3 of 3 intervals span more than a factor of 4.",
        ),
        (
            [(1250, 1251), (1300, 1301), (1000, 1600)],
            "2bw trains on 1.25 to 1.30 times as many tokens per second as 1f1b (95% intervals: ",
        ),
        ([(1250, 1251), (1250, 1251), (1250, 1251)], "as 1f1b (95% intervals: 1.24 to 1.26)."),
    ],
)
def test_speed_says_what_its_intervals_allow_and_that_the_machine_was_busy(
    speeds: list[tuple[int, int]], expected: str
) -> None:
    arms = ("adamw", "muon", "soap")
    runs = [run("1f1b", arm, seed=seed) for arm in arms for seed in (0, 1)]
    runs += [
        run("2bw", arm, seed=seed, speed=speed)
        for arm, of_arm in zip(arms, speeds, strict=True)
        for seed, speed in enumerate(of_arm)
    ]
    said = words_of(*runs)
    assert expected in said
    assert ("; 1 of 3 intervals hold 1" in said) == (speeds[0] == (1250, 1251) != speeds[2])
    assert "busy" not in said
    loaded = [replace(each, load_per_core=3.0) for each in runs[-2:]]
    said = words_of(*runs[:-2], *loaded)
    assert "The machine was busy during 2 of 12 runs (up to 3.0 processes per core): do not trust" in said
    [bars] = [chart for name, chart in charts_of_cells(aggregate(runs)[0]).items() if name == "throughput"]
    assert "standard deviation" not in bars.about
    adamw = bars.rows[3]
    interval = paired([math.log(speed) for speed in speeds[0]])
    low, high = (math.exp(interval.half_width * side + math.log(fmean(speeds[0]))) for side in (-1, 1))
    if high > 4 * low:
        assert (adamw.below, adamw.above, adamw.texts[0]) == (None, None, "ratio cannot be told")
    else:
        ends = (adamw.values[0] - adamw.below, adamw.values[0] + adamw.above)
        assert ends == pytest.approx((low, high))
        assert re.fullmatch(r"× 1\.\d\d \[\d\.\d\d, \d\.\d\d\]", adamw.texts[0])
    alone = [each for each in runs if each.value("seed") == 0]
    assert all(row.above is None for row in charts_of_cells(aggregate(alone)[0])["throughput"].rows)


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({"load_per_core": 3 * CROWDED}, f"busy during 1 of 2 runs (up to {3 * CROWDED:.1f} processes"),
        (
            {"start": Start(step=0, attention_share=0.38)},
            "Attention within documents: 62% of causal attention",
        ),
    ],
)
def test_conditions_of_some_of_the_runs_are_said(measured: dict[str, Any], said: str) -> None:
    plain = run("1f1b")
    other = replace(plain, **measured)
    alone, together = (" ".join(conditions_lines(aggregate(runs)[0])) for runs in ([plain], [plain, other]))
    assert said in together
    assert said.split()[0] not in alone


@pytest.mark.parametrize(
    ("hosts", "said"), [(1, "host h0"), (5, "or h4"), (6, "or h4 or 1 other"), (7, "or h4 or 2 others")]
)
def test_a_condition_names_its_first_values_and_counts_the_others(hosts: int, said: str) -> None:
    plain = run("1f1b", **{"parallel.stages": 1})
    starts = [Start(step=0, host=f"h{number}") for number in range(hosts)]
    runs = [replace(plain, start=start) for start in starts]
    geometry, machine, *_ = conditions_lines(aggregate(runs)[0])
    assert f"{said}, device" in machine
    assert geometry.startswith("Conditions: 1 stage;")


def uneven(schedule: str, seconds: list[list[float]], hosts: list[list[str]] | None = None) -> RunResult:
    """A run whose data ranks (of each rank of the pipeline) computed so long for a micro-batch."""
    result = run(schedule)
    start = Start(step=0, host="node0")
    even = segment(compute_seconds=[[0.0] * len(of_rank) for of_rank in seconds], hosts=hosts)
    measured = slowest([segment(steps=4, compute_seconds=seconds, hosts=hosts), even], start)
    return replace(result, slowest=measured)


def test_the_rank_that_others_wait_for_is_named() -> None:
    said = words_of(uneven("1f1b", [[1.0]] * 4), uneven("2bw", [[1.0], [1.0], [1.5], [1.0]]))
    assert (
        "Balance: in 2bw muon (run 2bw-0) rank 2 computes 1.33 times as long as the mean of the ranks" in said
    )
    assert "Slow machine" not in said
    # A cut is found for the run that these numbers are of.
    even, other = uneven("2bw", [[1.0]] * 4), uneven("2bw", [[1.0], [1.0], [1.5], [1.0]])
    said = words_of(
        run("1f1b"), even, replace(other, id="uneven", config={**(other.config or {}), "seed": 1})
    )
    assert "`asyncpp plan uneven --balance`" in said
    assert "--balance" not in words_of(run("1f1b"), uneven("2bw", [[1.0], [1.1]]))


def test_a_data_rank_that_is_slower_than_its_peers_is_named_with_its_machine() -> None:
    hosts = [["node1", "node2", "node3"], ["node4", "node5", "node6"]]
    said = words_of(run("1f1b"), uneven("2bw", [[1.0, 1.0, 1.0], [1.0, 1.3, 1.0]], hosts))
    assert "Slow machine: in 2bw muon (run 2bw-0) data rank 1 of rank 1, on node5, takes 1.30 times" in said
    assert "Balance" not in said
    found = slowest([segment(compute_seconds=[[1.0, 3.0]])], Start(step=0, host="node0"))
    assert found == Slowest(rank=0, ratio=1.0, peer=(0, 1), peer_ratio=3.0, host="node0")
    # One rank alone waits for nobody.
    for seconds in ([[1.0]], []):
        assert slowest([segment(compute_seconds=seconds)], None) is None


def swept(template: str) -> tuple[list[CellResult], list[str]]:
    """The cells of a shipped experiment, each with a loss of its own."""
    runs = [
        RunResult(
            id=resolved.cell.id,
            axes=resolved.cell.axes,
            config=dict(items(resolved.config)),
            state="completed",
            val_loss=2.0 + place / 1000,
        )
        for place, resolved in enumerate(expand(load(template, ())))
    ]
    return aggregate(runs)


def of(cell: CellResult, key: str) -> Any:
    return cell.runs[0].value(key)


@pytest.mark.parametrize("template", [name for name in template_names("experiments") if name != "verdict"])
def test_every_delayed_cell_of_the_shipped_experiments_has_its_counterpart(template: str) -> None:
    """But of the verdict, which compares with one synchronous arm at its own rate."""
    cells, notes = swept(template)
    assert notes == []
    for cell in cells:
        if cell.synchronous:
            assert cell.baseline is None
            continue
        assert (cell.baseline.schedule, cell.baseline.corrected) == ("1f1b", False)
        for key in ("optimizer", "optimizer.lr", "parallel.stages", "schedule.microbatches", "train.steps"):
            assert of(cell, key) == of(cell.baseline, key)
        assert (cell.uncorrected is None) == (not cell.corrected)
        if cell.uncorrected is not None:
            assert of(cell.uncorrected, "schedule") == of(cell, "schedule")
            assert cell.uncorrected.baseline.runs == cell.baseline.runs
    assert len(set(arm_names(cells))) == len(cells)


def test_a_correction_is_compared_with_the_same_cell_without_it() -> None:
    cells, _ = swept(str(ROOT / "benchmarks/results/depth-sweep.yaml"))
    [discounted] = [cell for cell in cells if cell.correction and of(cell, "parallel.stages") == 8]
    assert (discounted.uncorrected.optimizer, of(discounted.uncorrected, "parallel.stages")) == ("adamw", 8)
    compared = (discounted, discounted.uncorrected, discounted.baseline)
    with_it, without, beside = (cell.val_loss.mean for cell in compared)
    assert discounted.recovered == pytest.approx((without - with_it) / (without - beside))
    said = " ".join(summary_lines(cells))
    assert f"with lr-discount by {with_it - beside:+.3f} (a wider gap)" in said
    assert "none" not in " ".join(arm_names(cells))


def test_one_synchronous_cell_stands_beside_every_delay() -> None:
    cells, _ = swept("delay-sweep")
    delayed = [cell for cell in cells if cell.optimizer == "adamw" and not cell.synchronous]
    assert [of(cell, "schedule.delay") for cell in delayed] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len({id(cell.baseline.runs) for cell in delayed}) == 1
    gaps = [cell.gap for cell in delayed]
    [said] = [line for line in summary_lines(cells) if line.startswith("Loss")]
    # As many gaps are a range, of each arm.
    assert "against 1f1b, over 8 values of schedule.delay, 2bw changes" in said
    low, high = gaps.index(min(gaps)), gaps.index(max(gaps))
    expected = f"{gaps[low]:+.3f} (schedule.delay {low + 1}) to {gaps[high]:+.3f} ({high + 1})"
    assert f"of adamw by {expected}; of muon by" in said
    table = table_of_cells(cells)
    column = [heading.key for heading in table.headings].index("schedule.delay")
    shown = {(row[0], row[column]) for row in table.rows}
    assert shown == {("1f1b", "-"), *(("2bw", str(delay)) for delay in range(1, 9))}


def test_a_setting_without_a_use_is_shown_where_it_alone_tells_cells_apart() -> None:
    runs = [
        run(name, axes={"schedule.delay": delay}, **{"schedule.delay": delay})
        for name in ("1f1b", "2bw")
        for delay in (1, 2)
    ]
    rows = table_of_cells(aggregate(runs)[0]).rows
    assert len({tuple(row[:5]) for row in rows}) == 4


def test_shards_of_gradients_are_compared_with_a_synchronous_schedule_that_cannot_have_them() -> None:
    (synchronous, delayed), notes = aggregate([run("1f1b"), run("2bw", **{"parallel.shard_gradients": True})])
    assert (delayed.baseline, delayed.fastest, notes) == (synchronous, synchronous, [])


def test_reasons_against_a_comparison_are_named() -> None:
    _, notes = aggregate([run("1f1b"), run("paci", **{"train.clip": "stage"}), run("2bw")])
    assert notes == ["No synchronous counterpart for paci muon: the nearest differs in train.clip."]
    _, notes = aggregate([run("1f1b", "adamw"), run("2bw"), run("paci")])
    assert notes == [
        "No synchronous counterpart for 2bw muon and 1 more: the nearest differs in optimizer.name."
    ]
    _, notes = aggregate([run("2bw"), run("paci")])
    assert notes == []
