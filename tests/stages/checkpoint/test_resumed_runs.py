"""A run that goes on from a checkpoint computes the same bits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resumed import check_resumed, go_back, replay_twice, saving, wait_for_saving
from support.small_runs import Rows, in_processes, small_config, with_experts
from support.training_cases import cases, measured, of_writers

import stages.training_loop
from optimizers import NAMES
from stages.checkpoint import files
from stages.checkpoint.export import write_weights
from stages.checkpoint.export_options import ExportFormat, Weights
from stages.checkpoint.saved_weights import newest_weights
from stages.comm.process import Process
from stages.config.run_config import CORRECTION_NAMES, CorrectionConfig, ParallelConfig, RunConfig
from stages.pipeline.build import segment_lengths
from stages.trainer import replay, train
from stages.training_loop import TrainingResult
from stages.validation import ConfigError, check

FORMS = ["none", "error-feedback", "buffered", "decay-at-x", *CORRECTION_NAMES]


@pytest.mark.parametrize("correction", FORMS)
@pytest.mark.slow
def test_every_optimizer_goes_on_to_the_same_bits(correction: str, tmp_path: Path) -> None:
    """Without a correction; and each correction with a third of them."""
    schedule = {"discrepancy": "paci", "delay-compensation": "2bw"}.get(correction, "pipedream")
    refused = []
    for name in NAMES if correction == "none" else NAMES[FORMS.index(correction) % 3 :: 3]:
        config = saving(small_config(schedule, optimizer=name, clip="stage", layers=2, eval_interval=4))
        config.schedule.update_interval = None if schedule == "2bw" else 2
        if correction in CORRECTION_NAMES:
            config.correction = CorrectionConfig(name=correction)
            config.correction.sync_steps = 1 if correction == "sync-start" else None
        else:
            config.error_feedback.coefficient = 1.0
            config.error_feedback.form = "look-ahead" if correction == "error-feedback" else "buffered"
            config.error_feedback.decay_at = "x" if correction == "decay-at-x" else "y"
        try:
            check(config)
        except ConfigError as error:
            refused.append(str(error))
            continue
        replay_twice(config, tmp_path / name, step=2)
    assert not refused


def resume_here(process: Process, given: tuple[RunConfig, Path]) -> list[list[dict[str, Any]]]:
    """Train to the end, then again from step 2; the rows of both."""
    config, folder = given
    whole, resumed = Rows(), Rows()
    train(config, process=process, recorder=whole, checkpoints=folder)
    process.gather(None)
    if process.rank == 0:
        go_back(folder, 2)
    process.gather(None)
    train(config, process=process, recorder=resumed, checkpoints=folder)
    return [measured(whole), measured(resumed)]


class Killed(BaseException):
    pass


class KilledAt(Rows):
    """The run is gone when its nth row would be written."""

    def __init__(self, row: int) -> None:
        super().__init__()
        self._left = row

    def append(self, row: Any) -> None:
        if self._left == 0:
            raise Killed
        self._left -= 1
        super().append(row)


def replay_killed(config: RunConfig, folder: Path, *, row: int) -> Rows:
    """Kill a run before it writes a row, and go on from what is left; the rows from there on."""
    with pytest.raises(Killed):
        replay(config, recorder=KilledAt(row), checkpoints=folder)
    wait_for_saving()
    rows = Rows()
    replay(config, recorder=rows, checkpoints=folder)
    return rows


def last_saved(rows: list[dict[str, Any]], *, before: int) -> int:
    """The step of the last checkpoint (of every second step) that comes before a row: after the segment and
    the evaluation that end there."""
    next_row = rows[before]
    drains = [row["first_step"] + row["steps"] for row in rows[:before] if row["kind"] == "segment"]
    evaluated = next_row["step"] if next_row["kind"] == "eval" else None
    return max((step for step in drains if step % 2 == 0 and step != evaluated), default=0)


@pytest.mark.slow
def test_every_schedule_goes_on_to_the_same_bits(tmp_path: Path, chance: random.Random) -> None:
    """In processes; then the checkpoint that these wrote in replay; then a replay killed at a random row."""
    given = [
        (saving(config), tmp_path / str(n))
        for n, config in enumerate(cases(stages=2, experts_at=1, one_each=True))
    ]
    by_rank = in_processes(resume_here, given, size=2)
    for (config, folder), (whole, resumed) in zip(
        given, of_writers(by_rank, [config for config, _ in given]), strict=True
    ):
        check_resumed(whole, resumed, step=2)
        go_back(folder, 2)
        rows = Rows()
        replay(config, recorder=rows, checkpoints=folder)
        check_resumed(whole, measured(rows), step=2)
        killed_at = chance.randrange(1, len(whole))
        after_kill = measured(replay_killed(config, tmp_path / "killed" / folder.name, row=killed_at))
        check_resumed(whole, after_kill, step=last_saved(whole, before=killed_at))


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("form", ["look-ahead", "buffered"])
@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_stages(
    stages: int, optimizer: str, form: str, tmp_path: Path
) -> None:
    config = saving(
        small_config("2bw", microbatches=4, optimizer=optimizer, coefficient=1.0, form=form, steps=8),
        interval=4,
    )
    whole = replay(config, recorder=Rows(), checkpoints=tmp_path / "c")
    go_back(tmp_path / "c", 4)
    other = replace(config, parallel=ParallelConfig(stages=stages))
    resumed = replay(other, recorder=Rows(), checkpoints=tmp_path / "c")
    assert resumed.train_losses == pytest.approx(whole.train_losses[4:], rel=1e-6)
    assert resumed.val_losses == pytest.approx(whole.val_losses[-2:], rel=1e-6)


@pytest.mark.parametrize("cuts", [([1.5, 2.5], [3, 1]), ([3, 1], [2.5, 1.5]), ([0.5, 3.5], [1.5, 1, 1.5])])
@pytest.mark.parametrize("experts", [False, True])
def test_a_run_goes_on_with_another_cut_within_blocks(
    cuts: tuple[list[float], list[float]], experts: bool, tmp_path: Path
) -> None:
    """To the same bits, since no number is summed by stage; and what is saved is the same."""

    def config(cut: list[float]) -> RunConfig:
        options: dict[str, Any] = {"stages": len(cut), "cut": cut, "microbatches": 4, "clip": "none"}
        plain = small_config("2bw", optimizer="muon", coefficient=1.0, steps=4, **options)
        return saving(with_experts(plain) if experts else plain)

    first, second = map(config, cuts)
    whole = replay(first, recorder=Rows(), checkpoints=tmp_path / "c")
    other = replay(second, recorder=Rows(), checkpoints=tmp_path / "other")
    for run, folder in ((first, "c"), (second, "other")):
        (tmp_path / f"of {folder}").mkdir()
        saved = newest_weights(tmp_path / folder, run)
        write_weights(
            saved, run, tmp_path / f"of {folder}", format=ExportFormat.SAFETENSORS, weights=Weights.MASTER
        )
    go_back(tmp_path / "c", 2)
    resumed = replay(second, recorder=Rows(), checkpoints=tmp_path / "c")
    assert resumed.train_losses == whole.train_losses[2:] == other.train_losses[2:]
    for name, weight in whole.weights.items():
        assert torch.equal(resumed.weights[name], weight)
        assert torch.equal(other.weights[name], weight)
    one, another = (next((tmp_path / f"of {folder}").glob("*.safetensors")) for folder in ("c", "other"))
    assert one.read_bytes() == another.read_bytes()


@pytest.mark.parametrize(("split", "optimizer"), [(False, "adamw"), (True, "muon")])
@pytest.mark.slow
def test_a_v_goes_on_as_1f1b_and_back(split: bool, optimizer: str, tmp_path: Path) -> None:
    """Steps 0 to 3 are delayed, 4 and 5 synchronous, 6 and 7 delayed again: in a V of two ranks as on four
    stages in a row."""

    def through(folder: Path, schedule: str, *, stages: int, **options: Any) -> TrainingResult:
        def config(name: str, **changed: Any) -> RunConfig:
            return saving(
                small_config(name, stages=stages, microbatches=4, steps=8, optimizer=optimizer, **changed)
            )

        delayed = config(schedule, **options)
        replay(delayed, recorder=Rows(), checkpoints=folder)
        go_back(folder, 4)
        replay(config("1f1b"), recorder=Rows(), checkpoints=folder)
        go_back(folder, 6)
        # The checkpoint has one version, as after a synchronous start.
        delayed.correction = CorrectionConfig(name="sync-start")
        delayed.correction.sync_steps = 6
        return replay(delayed, recorder=Rows(), checkpoints=folder)

    in_v = through(tmp_path / "v", "2bw-v", stages=2, split=split)
    in_row = through(tmp_path / "row", "2bw", stages=4)
    assert len(in_v.train_losses) == 2
    assert in_v.train_losses == pytest.approx(in_row.train_losses, rel=1e-6)
    assert in_v.val_losses == pytest.approx(in_row.val_losses, rel=1e-6)
    for name, weight in in_row.weights.items():
        torch.testing.assert_close(in_v.weights[name], weight, rtol=1e-5, atol=1e-6)


def test_a_v_starts_synchronously_as_1f1b_does(tmp_path: Path) -> None:
    """The synchronous steps are those of v-min, whose stages are on the same ranks."""
    config = saving(small_config("2bw-v", microbatches=4, steps=6, precision="float64"))
    config.correction = CorrectionConfig(name="sync-start")
    config.correction.sync_steps = 4
    check(config)
    replay_twice(config, tmp_path / "c", step=2)
    rows, synchronous = Rows(), Rows()
    replay(config, recorder=rows)
    replay(small_config("1f1b", microbatches=4, steps=6, precision="float64"), recorder=synchronous)
    # Step 4 reads version 4 in both, step 5 in one.
    losses, expected = ([row["train_loss"] for row in run.of_kind("step")] for run in (rows, synchronous))
    assert losses[:5] == pytest.approx(expected[:5], rel=1e-10)
    assert losses[5] != pytest.approx(expected[5], rel=1e-10)


@pytest.mark.slow
def test_bfloat16_replicas_come_back(tmp_path: Path) -> None:
    replay_twice(saving(small_config("2bw", precision="bfloat16", coefficient=0.5)), tmp_path / "c", step=2)


class AfterCalls:
    """Says that the run is to end from the nth time on that it is asked."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def __call__(self) -> bool:
        self._left -= 1
        return self._left < 0


def also_draining_at(patch: pytest.MonkeyPatch, steps: Sequence[int]) -> None:
    """Let a run drain after these steps, too."""

    def lengths(config: RunConfig, *, start: int, end: int) -> list[tuple[int, int]]:
        ends = {first + length for first, length in segment_lengths(config, start=start, end=end)}
        ends |= {step for step in steps if step > start}
        return [(first, end - first) for first, end in pairwise([start, *sorted(ends)])]

    patch.setattr(stages.training_loop, "segment_lengths", lengths)


@pytest.mark.parametrize("asked", [0, 9])
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {}),
        ("interleaved-1f1b", {"chunks": 2}),
        ("2bw", {"coefficient": 1.0}),
        ("2bw", {"stages": 4, "microbatches": 4}),
        ("paci", {"clip": "stage"}),
        ("pipedream", {"clip": "stage", "update_interval": 1}),
    ],
)
@pytest.mark.slow
def test_a_run_that_is_told_to_end_goes_on_to_the_same_bits(
    schedule: str, options: dict[str, Any], asked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = saving(small_config(schedule, steps=9, eval_interval=4, **options), interval=4)
    whole, rows, stops = Rows(), Rows(), []
    ended: TrainingResult | None = None
    for calls in (asked, 2, 10**6):
        ended = replay(config, recorder=rows, checkpoints=tmp_path / "c", stop=AfterCalls(calls))
        stops.append(ended.stopped_at)
        if ended.stopped_at is None:
            break
        assert files.saved_steps(tmp_path / "c")[0] == ended.stopped_at
    assert ended is not None
    assert ended.stopped_at is None
    if schedule in ("paci", "pipedream"):
        # Each drain of these moves the numbers a little, so the same ones are made.
        also_draining_at(monkeypatch, [step for step in stops if step is not None])
    replay(config, recorder=whole)
    if asked == 0:
        assert stops[0] is not None
        assert stops[0] < 4, "it did not wait for the next drain"
    for kind in ("step", "eval", "end"):
        assert [row for row in measured(rows) if row["kind"] == kind] == [
            row for row in measured(whole) if row["kind"] == kind
        ]
