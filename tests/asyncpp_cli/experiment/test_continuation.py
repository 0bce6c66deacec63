"""`asyncpp extend`: runs that continue others with more steps or another layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.command_line import asyncpp, refusal, succeeded
from support.files import contents
from support.launches import launch_in_this_process, weights
from support.rows import plain

import asyncpp as api
from asyncpp_cli.runs.attempts.claims import claim
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.run_folder import Run

TINY = """\
name: tiny
matrix: {schedule: [1f1b, 2bw, gpipe]}
optimizer: adamw
optimizer.lr: 0.01
optimizer.schedule: constant
optimizer.warmup: 0
error_feedback: false
seed: 0
parallel: {stages: 2}
schedule: {microbatches: 4}
model: micro
model.layers: 2
model.width: 16
model.mlp_width: 32
data: {path: text.txt, context: 8}
train: {steps: 4, microbatch_size: 1, eval_interval: 4, eval_microbatches: 1}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a template, and the experiment `short` whose first two runs are completed."""
    folder = tmp_path_factory.mktemp("extend")
    (folder / "text.txt").write_text("To be, or not to be, that is the question. " * 100)
    (folder / "tiny.yaml").write_text(TINY.replace("text.txt", str(folder / "text.txt")))
    train(folder, "short", "train.steps=4")
    return folder


def train(folder: Path, name: str, *changes: str) -> list[Run]:
    """Sweep the template and train its first two runs."""
    succeeded("sweep", folder / "tiny.yaml", *changes, "--out", folder / name)
    return trained_runs(folder / name)


def trained_runs(folder: Path) -> list[Run]:
    runs = open_experiment(folder).runs[:2]
    for run in runs:
        succeeded("train", run.folder, "--replay")
    return runs


def last_loss(run: Run) -> float:
    return [float(row["val_loss"]) for row in plain(run) if row["kind"] == "eval"][-1]


@pytest.mark.slow
def test_a_run_in_two_parts_ends_with_the_weights_of_one(trained: Path, tmp_path: Path) -> None:
    """At a constant learning rate the number of steps changes nothing but the end."""
    before = contents(trained / "short")
    extended = succeeded(
        "extend", trained / "short", "1f1b", "2bw", "--steps", "6", "--out", tmp_path / "long"
    )
    assert "continues 1f1b" in extended.errors
    assert "from step 4 of 4 (train.steps 4 -> 6)" in extended.errors
    assert "the learning rate was 0.01 in step 4 and is 0.01 in step 5" in extended.errors
    continued = trained_runs(tmp_path / "long")
    for run in continued:
        assert [row["step"] for row in plain(run) if row["kind"] in ("start", "step")] == [4, 5, 6]
    whole = train(trained, "whole", "train.steps=6")
    assert [*map(weights, continued)] == [*map(weights, whole)]
    assert not {run.id for run in continued} & {run.id for run in whole}
    assert contents(trained / "short") == before
    [first, _] = json.loads(asyncpp("status", tmp_path / "long", "--json").output)
    assert (first["continues"]["step"], first["continues"]["changed"]) == (4, {"train.steps": [4, 6]})
    both = asyncpp("report", trained / "whole", tmp_path / "long", "--format", "json")
    cells = json.loads(both.output)
    # Equal settings, but not the same run: they are not averaged.
    assert [cell["n"] for cell in cells if cell["status"] == "completed"] == [1, 1, 1, 1]
    assert sum(len(cell["continues"]) for cell in cells) == 2
    assert "continues 2bw" in asyncpp("report", tmp_path / "long").output


@pytest.mark.slow
def test_a_run_continues_on_other_stages_and_data_ranks(trained: Path, tmp_path: Path) -> None:
    continued = api.open(trained / "short").extend(
        "1f1b", "2bw", out=tmp_path / "wide", steps=6, stages=1, data=2
    )
    configs = [run.config() for run in open_experiment(continued.folder).runs]
    assert {(config.parallel.stages, config.parallel.data) for config in configs} == {(1, 2)}
    assert {config.schedule.microbatches for config in configs} == {2}
    # The sums over data ranks are rounded otherwise: float32 has 7 digits.
    for run, same in zip(trained_runs(tmp_path / "wide"), whole(trained), strict=True):
        assert last_loss(run) == pytest.approx(last_loss(same), rel=1e-5)


def test_a_pipeline_continues_in_shards(trained: Path, tmp_path: Path) -> None:
    new = tmp_path / "shards"
    changes = ["--steps", "6", "--set", "schedule.name=fsdp"]
    extended = succeeded("extend", trained / "short", "1f1b", *changes, "--out", new)
    assert "1f1b -> fsdp" in extended.errors
    [run] = trained_runs(new)
    # The sums over data ranks are rounded otherwise: float32 has 7 digits.
    assert last_loss(run) == pytest.approx(last_loss(whole(trained)[0]), rel=1e-5)


def test_a_run_continues_under_a_cut_within_blocks(trained: Path, tmp_path: Path) -> None:
    new = tmp_path / "within"
    changes = ["--steps", "6", "--set", "parallel.cut=[0.5,1.5]"]
    extended = succeeded("extend", trained / "short", "1f1b", *changes, "--out", new)
    assert "-> [0.5, 1.5])" in extended.errors
    assert open_experiment(new).cells[0].axes["parallel.cut"] == "0.5-1.5"
    [run] = trained_runs(new)
    parameters = {row["kind"]: row.get("stage_parameters") for row in plain(run)}["start"]
    assert parameters[1] > parameters[0]
    # The gradient's norm is summed by stage: float32 has 7 digits.
    assert last_loss(run) == pytest.approx(last_loss(whole(trained)[0]), rel=1e-6)
    assert "0.5-1.5" in asyncpp("report", new, "--format", "csv").output


def whole(trained: Path) -> list[Run]:
    if not (trained / "whole").exists():
        train(trained, "whole", "train.steps=6")
    return open_experiment(trained / "whole").runs[:2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1f1b", "--steps", "4"], "nothing is left to train"),
        (["1f1b", "--steps", "6", "--data", "3"], "3 data ranks cannot share evenly"),
        (["1f1b", "--steps", "6", "--stages", "9"], "parallel.stages"),
        (["1f1b", "--set", "model.layers=4"], "model.layers cannot change"),
        (["1f1b", "--set", "nonsense"], "is not KEY=VALUE"),
        (["2bw", "--steps", "6", "--set", "schedule.name=fsdp"], "has not the weight versions of fsdp"),
        (["1f1b", "--steps", "6", "--set", "schedule.name=2bw"], "from one synchronous schedule to another"),
        (
            ["1f1b", "--steps", "6", "--set", "schedule.microbatches=2"],
            "tokens of a step must stay the same",
        ),
        (["1f1b"], "nothing to change"),
        (["gpipe", "--steps", "6"], "has no checkpoint to continue from"),
        (["--steps", "6"], "has no checkpoint to continue from"),
        (["none", "--steps", "6"], "no such run"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    trained: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    before = contents(trained)
    assert message in refusal("extend", trained / "short", *arguments, "--out", tmp_path / "new")
    assert contents(trained) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_damaged_checkpoint_a_running_run_and_a_used_folder_are_refused(
    trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("mine")
    refused = asyncpp("extend", trained / "short", "1f1b", "--steps", "6", "--out", tmp_path / "used")
    assert refused.code == 2
    assert (tmp_path / "used" / "file").read_text() == "mine"
    running = open_experiment(trained / "short").runs[2]
    assert claim(running, processes=1, replay=True, steps=4) is not None
    refused = asyncpp("extend", trained / "short", running.id, "--steps", "6", "--out", tmp_path / "new")
    assert "is running" in refused.errors
    made = api.open(trained / "short").extend("2bw", out=tmp_path / "made", steps=6)
    [run] = open_experiment(made.folder).runs
    # Linked to its parent's: another file in its place changes this run alone.
    state = run.checkpoints / "step-4" / "index.json"
    state.unlink()
    state.write_text("{}")
    refused = asyncpp("extend", made.folder, "--steps", "7", "--out", tmp_path / "new")
    assert "is damaged" in refused.errors
    said = refusal("train", run.folder, "--replay", remarks=1)
    assert "has no valid checkpoint of that step or a later one" in said
    assert [row for row in plain(run) if row["kind"] == "step"] == []
    (run.checkpoints / "step-4").rename(run.checkpoints / "gone")
    lineage = run.lineage()
    assert lineage is not None
    assert lineage.text in refusal("train", run.folder, "--replay")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_passed_over_or_refused(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs that differ in their seed: nothing but the name tells their checkpoints apart."""
    launch_in_this_process(monkeypatch)
    settings = ["matrix.schedule=[2bw]", "train.steps=6", "train.checkpoint_interval=2"]
    own, other = (train(trained, f"seed-{seed}", f"seed={seed}", *settings)[0] for seed in (5, 6))
    undisturbed = exported(own, tmp_path / "own")
    assert undisturbed != exported(other, tmp_path / "other")
    experiment = tmp_path / "paused"
    succeeded("sweep", trained / "tiny.yaml", "seed=5", *settings, "--out", experiment)
    succeeded("launch", experiment, "--replay", "--until", "4")
    [run] = open_experiment(experiment).runs
    shutil.rmtree(run.checkpoints / "step-4")
    shutil.copytree(other.checkpoints / "step-4", run.checkpoints / "step-4")
    belongs = f"belongs to run {other.id} (configuration "
    # Export takes the one before; extend, and a step that is asked for, are refused.
    ended = asyncpp("export", run.folder, "--format", "safetensors", "--out", tmp_path / "x")
    assert (ended.code, belongs in ended.errors, "after step 2" in ended.output) == (0, True, True)
    assert belongs in refusal("export", run.folder, "--step", "4", "--out", tmp_path / "y")
    assert belongs in refusal("extend", experiment, "--steps", "8", "--out", tmp_path / "z")
    # Where there is no other, training is refused in one line.
    shutil.move(run.checkpoints / "step-2", tmp_path / "step-2")
    refused = asyncpp("train", run.folder, "--replay")
    assert refused.code == 2
    assert "no checkpoint fits this run" in refused.errors.splitlines()[-1]
    assert "Traceback" not in refused.errors
    # With the one before it ends with the same weights.
    shutil.move(tmp_path / "step-2", run.checkpoints / "step-2")
    ended = asyncpp("train", run.folder, "--replay")
    assert (ended.code, belongs in ended.errors) == (0, True), ended.errors
    assert [row["step"] for row in plain(run) if row["kind"] == "start"] == [0, 2]
    assert exported(run, tmp_path / "again") == undisturbed


def exported(run: Run, folder: Path) -> bytes:
    succeeded("export", run.folder, "--format", "safetensors", "--out", folder)
    return (folder / "model.safetensors").read_bytes()


def test_a_checkpoint_names_its_run_through_two_continuations(trained: Path, tmp_path: Path) -> None:
    """A run that has not trained yet has its parent's checkpoint, and hands it on."""
    first = api.open(trained / "short").extend("2bw", out=tmp_path / "first", steps=6)
    succeeded("extend", first.folder, "--steps", "7", "--out", tmp_path / "second")
    [run] = open_experiment(tmp_path / "second").runs
    lineage = run.lineage()
    assert lineage is not None
    assert lineage.run == open_experiment(first.folder).runs[0].id
    assert lineage.saved_by.run == open_experiment(trained / "short").runs[1].id
    ended = succeeded("train", run.folder, "--replay")
    assert "is not used" not in ended.errors
    assert [row["step"] for row in plain(run) if row["kind"] == "start"] == [4]
