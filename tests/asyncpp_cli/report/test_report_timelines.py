"""What is predicted of a run, its bubble and its timeline, beside formulas and what it measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.report_experiment import ExperimentFolder, metrics, report_of, settings

from asyncpp_cli.report.analysis.conditions import conditions_lines
from asyncpp_cli.report.formats import page, timelines
from asyncpp_cli.report.formats.timelines import TimelinePair, timeline_pairs
from asyncpp_cli.report.load.checks import predicted
from stages.config.run_config import CorrectionConfig, ParallelConfig, RunConfig, ScheduleConfig, TrainConfig

GOOD: dict[str, Any] = {
    "first_step": 0,
    "steps": 4,
    "steps_kept": 1.0,
    "ranks": [
        [["0F7@3", 0, 100_000], ["0B7@3", 500_000, 700_000], ["0U4", 700_000, 710_000]],
        [["1F7@3", 150_000, 300_000], ["1B7@3", 300_000, 490_000], ["1U4", 490_000, 500_000]],
    ],
}


def timed() -> list[dict[str, Any]]:
    rows = metrics()
    for row in rows:
        if row["kind"] == "segment":
            row["action_seconds"] = {"F": [0.1, 0.15], "B": [0.2, 0.2], "U": [0.01, 0.01]}
    return rows


def pairs_of(folder: Path, *timelines: str | None) -> list[TimelinePair]:
    """Of an experiment with a seed for each of these contents of timeline.json."""
    experiment = ExperimentFolder(folder / "experiment")
    for seed, text in enumerate(timelines):
        run = experiment.add(settings("1f1b", "muon", seed=seed), rows=timed())
        if text is not None:
            run.timeline_file.write_text(text)
    return timeline_pairs(report_of(experiment.folder, keep_steps=False).cells)


def test_the_same_actions_are_measured_and_predicted(tmp_path: Path) -> None:
    [pair] = pairs_of(tmp_path, None, json.dumps({"format": 1} | GOOD))
    assert (pair.problem, pair.unit) == (None, "s")
    assert pair.steps == "The last step before the drain after step 4"
    assert list(pair.measured.starts[1]) == [0.15, 0.3, 0.49]
    assert list(pair.measured.ends[0]) == [0.1, 0.7, 0.71]
    # A micro-batch takes (0.3 + 0.35) / 2 seconds on average, a third of that in the forward. Before it,
    # rank 1 has the forward and the backward of micro-batch 6 to do. Both update once both have a gradient.
    third = 0.325 / 3
    assert pair.predicted.program.actions == pair.measured.program.actions
    assert list(pair.predicted.starts[0]) == pytest.approx([0, 6 * third, 8 * third])
    assert list(pair.predicted.starts[1]) == pytest.approx([3 * third, 4 * third, 8 * third])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        (json.dumps({"format": 99} | GOOD), "a newer asyncpp wrote it"),
        (json.dumps(GOOD | {"ranks": [[["0F7@3", 5, 1]], [["1F7@3", 0, 1]]]}), "has another form"),
        (json.dumps(GOOD | {"ranks": [[["<b>", 0, 1]], [["1F7@3", 0, 1]]]}), "has another form"),
        (json.dumps(GOOD | {"steps": 0}), "has another form"),
    ],
)
def test_a_damaged_timeline_is_named_and_another_one_taken(tmp_path: Path, text: str, said: str) -> None:
    [pair] = pairs_of(tmp_path / "alone", text)
    assert pair.measured is None
    assert said in pair.problem
    [pair] = pairs_of(tmp_path / "with another", text, json.dumps(GOOD))
    assert pair.measured is not None


def test_without_a_timeline_the_prediction_stands_alone(tmp_path: Path) -> None:
    [pair] = pairs_of(tmp_path, None)
    assert (pair.measured, pair.problem, pair.unit) == (None, None, "s")
    assert pair.steps.startswith("The first 4 steps")


def predicted_bubble(name: str, *, stages: int, microbatches: int) -> float | None:
    schedule = ScheduleConfig(name=name, microbatches=microbatches)
    parallel, train = ParallelConfig(stages=stages), TrainConfig(steps=100)
    found = predicted(RunConfig(schedule=schedule, parallel=parallel, train=train))
    return None if found is None else found.bubble


@pytest.mark.parametrize("name", ["zb-v", "paci-v"])
def test_few_microbatches_fill_all_stages_of_a_v_schedule_before_they_are_measured(
    tmp_path: Path, name: str
) -> None:
    assert predicted_bubble(name, stages=4, microbatches=1) is not None
    experiment = ExperimentFolder(tmp_path / "experiment")
    rows = metrics(stages=8, busy=((0.5,) * 4,) * 2)
    for row in rows:
        if row["kind"] == "segment":
            row["action_seconds"] = {"F": [0.1] * 8, "B": [0.2] * 8, "U": [0.0] * 8}
    shape = {"parallel.stages": 4, "model.layers": 8, "schedule.microbatches": 1}
    experiment.add(settings(name, "muon", **shape), rows=rows)
    [pair] = timeline_pairs(report_of(experiment.folder).cells)
    assert pair.mean_times_bubble == pytest.approx(pair.predicted_bubble)


def test_shards_wait_for_exchanges(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "experiment")
    rows = metrics(stages=1, busy=((0.25,),) * 2)
    experiment.add(settings("fsdp", "muon", **{"parallel.stages": 2, "schedule.microbatches": 2}), rows=rows)
    [pair] = timeline_pairs(report_of(experiment.folder).cells)
    assert pair.title == "fsdp, 2 processes, 2 micro-batches per step"
    assert (pair.predicted_bubble, pair.mean_times_bubble) == (None, None)
    assert page._bubbles(pair) == "Waits for exchanges: measured 75%."


def test_no_prediction_for_what_cannot_be_built_or_is_too_large_to_simulate() -> None:
    assert predicted_bubble("2bw", stages=0, microbatches=8) is None
    assert predicted_bubble("1f1b", stages=64, microbatches=4096) is None


def test_what_is_predicted_for_one_run_is_not_taken_for_another_of_the_same_schedule() -> None:
    """A matrix may vary settings beside `schedule` that change its program: shards are stages, too, and a
    synchronous start ends before the steady state."""
    schedule, stages = ScheduleConfig(name="2bw", microbatches=4), ParallelConfig(stages=2)
    plain = RunConfig(schedule=schedule, parallel=stages, train=TrainConfig(steps=20))
    sharded = replace(plain, parallel=replace(stages, shard_head=True))
    started = replace(plain, correction=CorrectionConfig(name="sync-start"))
    found = [predicted(config) for config in (plain, sharded, started)]
    assert [prediction.delays for prediction in found if prediction] == [(1, 1), (1, 1, 1, 1), (1, 1)]
    assert found[0] == found[2]
    assert found[0].bubble == pytest.approx(0.0, abs=1e-12)
    assert found[0].of_segment is None


def test_few_microbatches_in_a_deep_pipeline_have_the_bubble_of_the_long_run() -> None:
    schedule, long_segments = ScheduleConfig(name="2bw", microbatches=4, delay=4), {"checkpoint_interval": 0}
    config = RunConfig(schedule=schedule, parallel=ParallelConfig(stages=16))
    long = predicted(replace(config, train=TrainConfig(steps=1000, eval_interval=300, **long_segments)))
    short = predicted(replace(config, train=TrainConfig(steps=1000, eval_interval=12)))
    assert long.bubble == short.bubble == pytest.approx(1 - 12 / 21)
    assert long.of_segment is None
    steps, bubble = short.of_segment
    assert steps == 12
    assert 0.3 < bubble < short.bubble - 0.01


def test_a_report_says_both_bubbles_where_segments_are_too_short_to_settle(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "experiment")
    shape = {"parallel.stages": 16, "model.layers": 16, "train.steps": 12}
    for microbatches, delay in (4, 4), (16, 1):
        schedule = {"schedule.microbatches": microbatches, "schedule.delay": delay}
        experiment.add(
            settings("2bw", "muon", **shape, **schedule),
            rows=metrics(stages=16, evaluated=(6, 12)),
        )
    report = report_of(experiment.folder)
    assert [f"{cell.bubble_predicted:.1%}" for cell in report.cells] == ["42.9%", "0.0%"]
    [said] = [line for line in conditions_lines(report.cells) if "settle" in line]
    assert "2bw takes longer to settle than a segment of 12 steps" in said
    assert said.endswith("33% there, 43% in the long run.")


def test_numbers_in_boxes_have_contrast_on_light_and_dark_pages() -> None:
    """WCAG 2.1 asks for 4.5; the text is black, or white where its class says so."""
    for hue in timelines._HUES:
        for opacity in (0.4, 0.7, 1.0):
            inks = timelines._INKS[hue, opacity].split()
            for name, ground in timelines._GROUNDS.items():
                box = timelines._luminance(hue, opacity, ground)
                ink = 1.0 if name in inks else 0.0
                light, dark = max(box, ink) + 0.05, min(box, ink) + 0.05
                assert light / dark >= 4.5, (hue, opacity, name)
