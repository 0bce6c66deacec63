"""A cut for ranks as fast as a run measured, against all cuts that there are."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import refusal, succeeded
from support.report_experiment import ExperimentFolder, metrics, settings
from support.small_runs import small_config

from asyncpp_cli.planner.balance import measured_balance
from schedules.costs import RankTimes
from stages.config.run_config import RunConfig
from stages.config.segments import schedule_facts
from stages.shape.families import describe
from stages.shape.partition import StageCut, cut_of, stage_cuts


def seconds_of(config: RunConfig, cuts: list[StageCut], pace: list[float]) -> list[float]:
    """What each rank computes for a micro-batch if a multiply-add takes it `pace`."""
    spec, context = describe(config.model), config.data.context
    rank_of_stage = schedule_facts(config).placement or range(len(cuts))
    seconds = [0.0] * len(pace)
    for rank, cut in zip(rank_of_stage, cuts, strict=True):
        load = sum(spec.halves[half].forward_multiply_adds(context=context) for half in cut.halves)
        if cut.has_head:
            load += spec.head.forward_multiply_adds(context=context)
        seconds[rank] += load * pace[rank]
    return seconds


def every_cut(config: RunConfig, stages: int) -> list[list[StageCut]]:
    """Stages of at least half a block, the last perhaps with the head alone; in a V, whose ranks hold two
    stages, those of the way back hold whole blocks."""
    halves = 2 * config.model.layers
    ends = itertools.combinations_with_replacement(range(1, halves + 1), stages - 1)
    cuts = []
    for inner in ends:
        sizes = [b - a for a, b in itertools.pairwise([0, *inner, halves])]
        on_the_way_back = sizes[config.parallel.stages :] if stages > config.parallel.stages else []
        if min(sizes[:-1]) > 0 and all(size % 2 == 0 for size in on_the_way_back):
            cuts.append(stage_cuts([size / 2 for size in sizes]))
    return cuts


@hypothesis.settings(max_examples=40, deadline=None)
@given(
    schedule=st.sampled_from(["1f1b", "2bw", "2bw-v"]),
    pace=st.lists(st.sampled_from([1.0, 1.25, 2.0, 4.0]), min_size=2, max_size=3),
    layers=st.integers(6, 7),
)
def test_no_cut_has_a_faster_slowest_rank(schedule: str, pace: list[float], layers: int) -> None:
    config = small_config(schedule, text=Path("none"), stages=len(pace), microbatches=4, layers=layers)
    measured = seconds_of(config, cut_of(config), pace)
    found = measured_balance(
        config,
        RankTimes(
            forward=tuple(took / 4 for took in measured),
            input_half=tuple(took / 2 for took in measured),
            weight_half=tuple(took / 4 for took in measured),
            update=tuple(0.0 for _ in measured),
        ),
    )
    assert found.seconds == pytest.approx(measured)
    mean = sum(pace) / len(pace)
    assert found.speed == pytest.approx([mean / of_rank for of_rank in pace])
    assert found.expected == pytest.approx(seconds_of(config, stage_cuts(found.even_cut), pace))
    best = min(max(seconds_of(config, cuts, pace)) for cuts in every_cut(config, len(found.cut)))
    assert max(found.expected) == pytest.approx(best)
    assert found.costs == ([1, 2, 1] if schedule == "2bw-v" else None)


def test_plan_balances_a_run_by_its_times(tmp_path: Path) -> None:
    rows = metrics()
    for row in rows:
        row |= {
            "start": {"rank_of_stage": [0, 1]},
            "segment": {"action_seconds": {"F": [1.0, 4.0], "B": [2.0, 5.0], "U": [0.1, 0.1]}},
        }.get(row["kind"], {})
    run = ExperimentFolder(tmp_path / "experiment").add(settings("1f1b", "muon"), rows=rows)
    found = json.loads(succeeded("plan", run.folder, "--balance", "--json").output)
    assert found["seconds"] == [3.0, 9.0]
    assert found["cut"] == [2, 2]
    assert found["even_cut"][0] > 2
    assert found["efficiency"] == pytest.approx(6 / 9)
    assert found["expected_efficiency"] > found["efficiency"]
    shown = " ".join(succeeded("plan", run.folder, "--balance").output.split())
    assert "with parallel.cut: [2, 2]" in shown
    assert f"with parallel.cut: {found['even_cut']}, whose memory is not checked" in shown
    assert "takes no train.steps=5" in refusal("plan", run.folder, "train.steps=5", "--balance")
    unplaced = [{key: value for key, value in row.items() if key != "rank_of_stage"} for row in rows]
    for row in rows:
        row.pop("action_seconds", None)
    replayed = ExperimentFolder(tmp_path / "replayed").add(settings("1f1b", "muon"), rows=rows)
    assert "no segment of it was measured" in refusal("plan", replayed.folder, "--balance")
    damaged = ExperimentFolder(tmp_path / "damaged").add(settings("1f1b", "muon"), rows=unplaced)
    assert "a row lacks rank_of_stage" in refusal("plan", damaged.folder, "--balance")
