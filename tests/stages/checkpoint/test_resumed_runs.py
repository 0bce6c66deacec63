"""A run that goes on from a checkpoint computes the same bits."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resumed import check_resumed, go_back, replay_twice, saving, wait_for_saving
from support.single_process import check_close, joined
from support.small_runs import Rows, in_processes, replayed, small_config, with_experts
from support.training_cases import cases, measured, named, of_writers

from optimizers import NAMES
from stages.checkpoint import files
from stages.checkpoint.export import write_weights
from stages.checkpoint.export_options import ExportFormat, Weights
from stages.checkpoint.saved_weights import newest_weights
from stages.comm.process import Process
from stages.config.run_config import CORRECTION_NAMES, CorrectionConfig, RunConfig, changed
from stages.resolve.checks import ConfigError, check
from stages.resolve.facts import Resolved
from stages.rows import Row
from stages.shape.families import describe
from stages.trainer import replay, train
from stages.training_loop import TrainingResult

FORMS = ["none", "error-feedback", "buffered", "decay-at-x", *CORRECTION_NAMES]


@pytest.mark.parametrize("correction", FORMS)
@pytest.mark.slow
def test_every_optimizer_goes_on_to_the_same_bits(correction: str, tmp_path: Path) -> None:
    """Without a correction; and each correction with a third of them."""
    schedule = {"discrepancy": "paci", "delay-compensation": "2bw"}.get(correction, "pipedream")
    refused = []
    for name in NAMES if correction == "none" else NAMES[FORMS.index(correction) % 3 :: 3]:
        config = saving(small_config(schedule, optimizer=name, layers=2, eval_interval=4))
        config = changed(config, {"schedule.update_interval": None if schedule == "2bw" else 2})
        if correction in CORRECTION_NAMES:
            config = changed(config, {"correction": CorrectionConfig(name=correction)})
            config = changed(config, {"correction.sync_steps": 1 if correction == "sync-start" else None})
        else:
            config = changed(
                config,
                {
                    "error_feedback.coefficient": 1.0,
                    "error_feedback.form": "look-ahead" if correction == "error-feedback" else "buffered",
                    "error_feedback.decay_at": "x" if correction == "decay-at-x" else "y",
                },
            )
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
    process.meetings.gather(None)
    if process.rank == 0:
        go_back(folder, 2)
    process.meetings.gather(None)
    train(config, process=process, recorder=resumed, checkpoints=folder)
    return [measured(whole), measured(resumed)]


class Killed(BaseException):
    pass


class KilledAt(Rows):
    """The run is gone when its nth row would be written."""

    def __init__(self, row: int) -> None:
        super().__init__()
        self._left = row

    def append(self, row: Row) -> None:
        if self._left == 0:
            raise Killed
        self._left -= 1
        super().append(row)


def replay_killed(config: RunConfig, folder: Path, *, row: int) -> Rows:
    """Kill a run before it writes a row, and go on from what is left; the rows from there on."""
    with pytest.raises(Killed):
        replay(config, recorder=KilledAt(row), checkpoints=folder)
    wait_for_saving()
    return replayed(config, checkpoints=folder)


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
    sharded = [small_config(schedule, stages=1, data=2) for schedule in ("2bw", "paci")]
    configs = [*cases(stages=2, experts_at=1), *sharded]
    given = [(saving(config), tmp_path / str(number)) for number, config in enumerate(configs)]
    by_rank = in_processes(resume_here, given, size=2)
    for (config, folder), (whole, resumed) in zip(given, of_writers(by_rank), strict=True):
        check_resumed(whole, resumed, step=2)
        go_back(folder, 2)
        rows = replayed(config, checkpoints=folder)
        check_resumed(whole, measured(rows), step=2)
        killed_at = chance.randrange(1, len(whole))
        after_kill = measured(replay_killed(config, tmp_path / "killed" / folder.name, row=killed_at))
        check_resumed(whole, after_kill, step=last_saved(whole, before=killed_at))


RESUMED: list[dict[str, Any]] = [
    {"schedule": "2bw", "precision": "bfloat16", "coefficient": 0.5},
    {"schedule": "2bw", "data": 2, "coefficient": 1.0, "form": "buffered"},
    {"schedule": "2bw", "data": 2, "coefficient": 1.0, "optimizer": "muon"},
    {"schedule": "2bw", "data": 2, "coefficient": 1.0, "optimizer": "soap"},
    *(
        {"schedule": schedule, "optimizer": "muon", "shard_head": True, "vocab_size": 259}
        for schedule in ("1f1b", "2bw", "2bw-v")
    ),
    {"schedule": "2bw-v", "family": "tied", "coefficient": 1.0, "optimizer": "muon"},
    {"schedule": "2bw", "ema_decay": 0.8, "coefficient": 1.0, "form": "buffered", "data": 2},
    {"schedule": "2bw-v", "ema_decay": 0.8, "precision": "bfloat16", "optimizer": "muon"},
    {"schedule": "2bw", "ema_decay": 0.8, "shard_head": True},
]


@pytest.mark.parametrize("case", RESUMED, ids=named)
def test_a_run_goes_on_to_the_same_bits(case: dict[str, Any], tmp_path: Path) -> None:
    replay_twice(saving(small_config(**{"microbatches": 4, "steps": 6} | case)), tmp_path / "c", step=2)


WITH_SHARDS = {"shard_head": True, "stages": 3}
OTHER_LAYOUTS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    *(
        ({"schedule": "2bw", "optimizer": optimizer, "form": form, "coefficient": 1.0}, before, now)
        for optimizer, form, before, now in (
            ("adamw", "buffered", {"stages": 2}, {"stages": 4}),
            ("adamw", "buffered", {"stages": 2}, {"stages": 1, "data": 2}),
            ("muon", "look-ahead", {"stages": 2}, {"stages": 1}),
            ("muon", "look-ahead", {"stages": 2, "data": 2}, {"stages": 4}),
            ("muon", "look-ahead", {"stages": 1, "data": 4}, {"stages": 2, "data": 2}),
        )
    ),
    *(
        ({"schedule": schedule, "family": family, "vocab_size": 259}, before, now)
        for schedule, family in (("2bw", "llama"), ("2bw-v", "tied"))
        for before, now in (
            (WITH_SHARDS, {"shard_head": True, "stages": 2}),
            (WITH_SHARDS, {"stages": 2}),
            ({"stages": 2}, WITH_SHARDS),
        )
    ),
    # A drain of 2bw-v leaves two versions, which 2bw on one rank goes on with.
    ({"family": "tied", "coefficient": 1.0}, {"schedule": "2bw-v"}, {"schedule": "2bw", "stages": 1}),
]


@pytest.mark.parametrize(("common", "before", "now"), OTHER_LAYOUTS, ids=named)
def test_a_run_goes_on_with_another_layout(
    common: dict[str, Any], before: dict[str, Any], now: dict[str, Any], tmp_path: Path
) -> None:
    """As with the one that saved: losses differ by the order of sums alone, and what is exported is the
    same."""
    settings: dict[str, Any] = {"layers": 6, "precision": "float64"} | common
    configs = [
        saving(small_config(microbatches=4 // layout.get("data", 1), **settings, **layout))
        for layout in (before, now)
    ]
    whole = replay(configs[0], recorder=Rows(), checkpoints=tmp_path / "c")
    go_back(tmp_path / "c", 2)
    assert exported(tmp_path / "c", configs[0]) == exported(tmp_path / "c", configs[1])
    other = replay(configs[1], recorder=Rows(), checkpoints=tmp_path / "c")
    assert other.train_losses == pytest.approx(whole.train_losses[2:], rel=1e-11)
    assert other.val_losses == pytest.approx(whole.val_losses[-2:], rel=1e-11)
    one, another = (
        joined(result.weights) if config.parallel.shard_head else result.weights
        for config, result in zip(configs, (whole, other), strict=True)
    )
    check_close(another, one)


def exported(folder: Path, config: RunConfig) -> bytes:
    """The newest checkpoint's weights, as they are exported."""
    with tempfile.TemporaryDirectory() as out:
        options: dict[str, Any] = {"format": ExportFormat.HF, "weights": Weights.MASTER}
        if config.model.experts:
            options["format"] = ExportFormat.SAFETENSORS
        count = write_weights(newest_weights(folder, config), config, Path(out), **options)
        assert count == describe(config.model).parameter_count
        return (Path(out) / "model.safetensors").read_bytes()


@pytest.mark.parametrize("cuts", [([1.5, 2.5], [3, 1]), ([3, 1], [2.5, 1.5]), ([0.5, 3.5], [1.5, 1, 1.5])])
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.slow
def test_a_run_goes_on_with_another_cut_within_blocks(
    cuts: tuple[list[float], list[float]], experts: bool, tmp_path: Path
) -> None:
    """To the same bits, since no number is summed by stage; and what is saved is the same."""
    settings: dict[str, Any] = {"microbatches": 4, "optimizer": "muon", "coefficient": 1.0, "clip": "none"}
    configs = [saving(small_config("2bw", stages=len(cut), cut=cut, **settings)) for cut in cuts]
    first, second = map(with_experts, configs) if experts else configs
    whole = replay(first, recorder=Rows(), checkpoints=tmp_path / "c")
    other = replay(second, recorder=Rows(), checkpoints=tmp_path / "other")
    assert exported(tmp_path / "c", first) == exported(tmp_path / "other", second)
    go_back(tmp_path / "c", 2)
    resumed = replay(second, recorder=Rows(), checkpoints=tmp_path / "c")
    assert resumed.train_losses == whole.train_losses[2:] == other.train_losses[2:]
    for name, weight in whole.weights.items():
        assert torch.equal(resumed.weights[name], weight)
        assert torch.equal(other.weights[name], weight)


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
        delayed = changed(delayed, {"correction": CorrectionConfig(name="sync-start")})
        delayed = changed(delayed, {"correction.sync_steps": 6})
        return replay(delayed, recorder=Rows(), checkpoints=folder)

    in_v = through(tmp_path / "v", "2bw-v", stages=2, split=split)
    in_row = through(tmp_path / "row", "2bw", stages=4)
    assert len(in_v.train_losses) == 2
    assert in_v.train_losses == pytest.approx(in_row.train_losses, rel=1e-6)
    assert in_v.val_losses == pytest.approx(in_row.val_losses, rel=1e-6)
    for name, weight in in_row.weights.items():
        torch.testing.assert_close(in_v.weights[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_v_starts_synchronously_as_1f1b_does(tmp_path: Path) -> None:
    """The synchronous steps are those of v-min, whose stages are on the same ranks."""
    config = saving(small_config("2bw-v", microbatches=4, steps=6, precision="float64"))
    config = changed(config, {"correction": CorrectionConfig(name="sync-start")})
    config = changed(config, {"correction.sync_steps": 4})
    check(config)
    replay_twice(config, tmp_path / "c", step=2)
    synchronous = small_config("1f1b", microbatches=4, steps=6, precision="float64")
    # Step 4 reads version 4 in both, step 5 in one.
    losses, expected = (
        [row["train_loss"] for row in replayed(each).of_kind("step")] for each in (config, synchronous)
    )
    assert losses[:5] == pytest.approx(expected[:5], rel=1e-10)
    assert losses[5] != pytest.approx(expected[5], rel=1e-10)


class AfterCalls:
    """Says that the run is to end from the nth time on that it is asked."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def __call__(self) -> bool:
        self._left -= 1
        return self._left < 0


def also_draining_at(patch: pytest.MonkeyPatch, steps: Sequence[int]) -> None:
    """Let a run drain after these steps, too."""

    segments = Resolved.segments

    def lengths(run: Resolved, *, start: int = 0, end: int | None = None) -> list[tuple[int, int]]:
        ends = {first + length for first, length in segments(run, start=start, end=end)}
        ends |= {step for step in steps if step > start and end is not None}
        return [(first, end - first) for first, end in pairwise([start, *sorted(ends)])]

    patch.setattr(Resolved, "segments", lengths)


@pytest.mark.parametrize(
    ("schedule", "options", "asked"),
    [
        ("interleaved-1f1b", {}, 0),
        ("2bw", {"coefficient": 1.0}, 0),
        ("2bw", {"stages": 4, "microbatches": 4}, 9),
        ("paci", {}, 9),
        ("pipedream", {"update_interval": 1}, 0),
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
