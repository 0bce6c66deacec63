"""The sentences under the table say what the cells say, and no more."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from support import report_experiment

from asyncpp_cli.report.analysis.aggregate import aggregate
from asyncpp_cli.report.analysis.conditions import CROWDED, conditions_lines
from asyncpp_cli.report.analysis.statistics import paired
from asyncpp_cli.report.analysis.summary import summary_lines
from asyncpp_cli.report.formats.charts import charts
from asyncpp_cli.report.load.measure import Slowest, slowest
from asyncpp_cli.report.load.run import RunResult


def words_of(*runs: RunResult) -> str:
    cells, _ = aggregate(runs)
    return " ".join(summary_lines(cells))


def run(
    *named: Any, bubble: float | None = None, tokens_per_parameter: float = 40.0, **further: Any
) -> RunResult:
    start = {"parameters": 1000, "tokens_per_step": 100 * tokens_per_parameter}
    measured = {"steps_done": 10, "bubble": bubble, "start": start}
    return report_experiment.run(*named, measured=measured, **further)


def test_costs_of_each_optimizer_and_what_error_feedback_recovers() -> None:
    said = words_of(
        run("1f1b", "adamw", loss=2.0),
        run("1f1b", "muon", loss=1.5),
        run("2bw", "adamw", loss=2.5),
        run("2bw", "adamw", 1.0, loss=2.125),
        run("2bw", "muon", loss=1.625),
        run("2bw", "muon", 0.5, loss=1.75),
    )
    assert "of adamw by +0.500, with error feedback by +0.125 (75% of the gap closed);" in said
    assert "of muon by +0.125, with error feedback (c = 0.5) by +0.250 (a wider gap)" in said


def test_a_better_delayed_cell_is_not_said_to_cost() -> None:
    said = words_of(run("1f1b", loss=2.0), run("2bw", loss=1.9), run("2bw", "muon", 1.0, loss=1.95))
    assert "of muon by -0.100, with error feedback by -0.050 nats" in said
    assert "closed" not in said


def test_speed_gives_the_range_over_the_pairs_and_the_waiting() -> None:
    said = words_of(
        run("1f1b", "adamw", loss=2.0, speed=1000.0, bubble=0.31),
        run("1f1b", "muon", loss=2.0, speed=1000.0, bubble=0.33),
        run("2bw", "adamw", loss=2.0, speed=1250.0, bubble=0.04),
        run("2bw", "muon", loss=2.0, speed=1500.0, bubble=0.04),
    )
    assert "2bw trains on 1.25 to 1.50 times as many tokens per second as 1f1b" in said
    assert "wait 4% of the time instead of 31% to 33%" in said


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        # Three arms, of two seeds each, whose intervals hold 1.
        (
            [(1100, 1400), (1050, 1300), (1000, 1600)],
            "Speed: the tokens per second of 2bw and 1f1b cannot be told apart: 1.18 to 1.30 times as many "
            "(95% intervals: 0.06 to ",
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
    runs = [run("1f1b", arm, loss=2.0, seed=seed) for arm in arms for seed in (0, 1)]
    runs += [
        run("2bw", arm, loss=2.0, seed=seed, speed=speed)
        for arm, of_arm in zip(arms, speeds, strict=True)
        for seed, speed in enumerate(of_arm)
    ]
    said = words_of(*runs)
    assert expected in said
    assert ("which 1 of 3 cells cannot tell from 1" in said) == (speeds[0] == (1250, 1251) != speeds[2])
    assert "busy" not in said
    loaded = [replace(each, measurement=replace(each.measurement, load_per_core=3.0)) for each in runs[-2:]]
    said = words_of(*runs[:-2], *loaded)
    assert "The machine was busy during 2 of 12 runs (up to 3.0 processes per core): do not trust" in said
    [bars] = [chart for name, chart in charts(aggregate(runs)[0]).items() if name == "throughput"]
    assert "standard deviation" not in bars.about
    adamw = bars.rows[3]
    interval = paired([float(speed) for speed in speeds[0]])
    assert interval is not None
    assert adamw.above == adamw.below == pytest.approx(interval.half_width)
    assert re.fullmatch(r"×1\.\d\d±\d+\.\d\d", adamw.texts[0])
    alone = [each for each in runs if each.value("seed") == 0]
    assert all(row.above is None for row in charts(aggregate(alone)[0])["throughput"].rows)


def test_nothing_is_said_without_a_comparison() -> None:
    assert words_of(run("2bw", loss=2.0)) == ""
    assert words_of(run("1f1b", loss=2.0), run("gpipe", loss=2.0)) == ""
    assert words_of() == ""


def test_few_seeds_and_short_runs_are_named() -> None:
    assert "n = 1" in words_of(run("1f1b", loss=2.0), run("2bw", loss=2.5))
    three = [run(name, loss=2.0, seed=seed) for name in ("1f1b", "2bw") for seed in range(3)]
    assert "n = " not in words_of(*three)
    assert "short run" not in words_of(*three)
    short = words_of(
        run("1f1b", loss=2.0, tokens_per_parameter=0.5), run("2bw", loss=2.5, tokens_per_parameter=0.5)
    )
    assert "A short run (0.5 tokens per parameter" in short


def test_each_model_has_its_sentence() -> None:
    said = words_of(
        run("1f1b", loss=2.0),
        run("2bw", loss=2.5),
        run("1f1b", loss=1.0, **{"model.name": "micro"}),
        run("2bw", loss=1.25, **{"model.name": "micro"}),
    )
    assert "Loss (nano): against 1f1b, 2bw changes the validation loss of muon by +0.500" in said
    assert "Loss (micro): against 1f1b, 2bw changes the validation loss of muon by +0.250" in said


def test_a_machine_that_was_busy_is_named() -> None:
    idle = run("1f1b", loss=2.0)
    busy = replace(idle, measurement=replace(idle.measurement, load_per_core=3 * CROWDED))
    for runs, said in (([idle], False), ([idle, busy], True)):
        lines = " ".join(conditions_lines(aggregate(runs)[0]))
        assert (f"busy during 1 of 2 runs (up to {3 * CROWDED:.1f} processes per core)" in lines) == said


def test_the_share_of_attention_that_documents_mask_is_said() -> None:
    plain = run("1f1b", loss=2.0)
    masked = replace(plain, measurement=replace(plain.measurement, start={"attention_share": 0.38}))
    said = "Attention within documents: 62% of causal attention is masked"
    assert said in conditions_lines(aggregate([plain, masked])[0])
    assert "Attention" not in " ".join(conditions_lines(aggregate([plain])[0]))


def uneven(schedule: str, seconds: list[list[float]], hosts: list[list[str]] | None = None) -> RunResult:
    """A run whose data ranks (of each rank of the pipeline) computed so long for a micro-batch."""
    result = run(schedule, loss=2.0)
    start = {"host": "node0", **(result.measurement.start or {})}
    segment = {"steps": 4, "compute_seconds": seconds} | ({"hosts": hosts} if hosts else {})
    even = segment | {"steps": 1, "compute_seconds": [[0.0] * len(of_rank) for of_rank in seconds]}
    measured = slowest([segment, even], start)
    return replace(result, measurement=replace(result.measurement, slowest=measured))


def test_the_rank_that_others_wait_for_is_named() -> None:
    said = words_of(uneven("1f1b", [[1.0], [1.0], [1.0], [1.0]]), uneven("2bw", [[1.0], [1.0], [1.5], [1.0]]))
    assert "Balance: in 2bw muon rank 2 computes 1.33 times as long as the mean of the ranks" in said
    assert "Slow machine" not in said
    assert "--balance" not in words_of(run("1f1b", loss=2.0), uneven("2bw", [[1.0], [1.1]]))


def test_a_data_rank_that_is_slower_than_its_peers_is_named_with_its_machine() -> None:
    hosts = [["node1", "node2", "node3"], ["node4", "node5", "node6"]]
    said = words_of(run("1f1b", loss=2.0), uneven("2bw", [[1.0, 1.0, 1.0], [1.0, 1.3, 1.0]], hosts))
    assert "Slow machine: in 2bw muon data rank 1 of rank 1, on node5, takes 1.30 times" in said
    assert "Balance" not in said
    found = slowest([{"steps": 1, "compute_seconds": [[1.0, 3.0]]}], {"host": "node0"})
    assert found == Slowest(rank=0, ratio=1.0, peer=(0, 1), peer_ratio=3.0, host="node0")


def test_one_rank_alone_waits_for_nobody() -> None:
    assert slowest([{"steps": 1, "compute_seconds": [[1.0]]}], None) is None
    assert slowest([{"steps": 1, "compute_seconds": []}], None) is None
