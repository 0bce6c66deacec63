"""`asyncpp evaluate`: scores of checkpoints by lm-evaluation-harness, in the run's folder and the report."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.command_line import asyncpp, refusal, succeeded
from support.launches import train_all
from support.report_experiment import cells_of, report_of
from support.small_task import QUESTIONS, right_answers, write_task

import asyncpp as api
from asyncpp_cli.experiment.run_data import owners_of
from asyncpp_cli.report.formats.charts import charts
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.scores import FILE, Score, scores_of
from asyncpp_cli.runs.status import State, Status
from asyncpp_cli.scoring import evaluation
from asyncpp_cli.scoring.evaluation import Asked, evaluate_run
from asyncpp_cli.scoring.harness import Answer, TaskScore

needs_harness = pytest.mark.skipif(
    not (find_spec("lm_eval") and find_spec("accelerate")), reason="the extra eval is not installed"
)


@pytest.fixture
def own_run(run: Run, tmp_path: Path) -> Run:
    """A copy of the trained run, to which scores may be added."""
    experiment = tmp_path / "e"
    shutil.copytree(run.folder.parent.parent, experiment)
    [copy] = open_experiment(experiment).runs
    copy.write_status(Status(state=State.COMPLETED, attempt=1, step=2, steps=2))
    return copy


def scores(run: Run) -> list[Score]:
    found, problems = scores_of(run, owners_of(run)[0])
    assert problems == []
    return found


def instead_of_the_harness(run: Run, asked: Asked, tasks: list[str], model: Path) -> Answer:
    assert (model / "model.safetensors").is_file()
    found = (
        TaskScore(
            asked=task,
            task=task,
            metrics={"acc": 0.25, "acc_norm": 0.5},
            errors={"acc": 0.1},
            samples=4,
            content_sha256="",
        )
        for task in tasks
    )
    return Answer(harness="none", scores=tuple(found))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores without the harness, which takes ten seconds to import."""
    monkeypatch.setattr(evaluation, "_answer", instead_of_the_harness)
    monkeypatch.setattr(evaluation, "check_harness", lambda: None)
    monkeypatch.setattr(evaluation, "POLL_SECONDS", 0.01)


@needs_harness
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_scores_are_those_of_transformers_with_the_same_export(own_run: Run, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    task = write_task(tmp_path / "tasks")
    said = succeeded("evaluate", own_run.folder, "--tasks", task).output
    succeeded("export", own_run.folder, "--out", tmp_path / "hf")
    expected = right_answers(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"))
    [score] = scores(own_run)
    # Of the shares to the bit; the Brier score has float32 logits, of texts in a batch.
    brier = expected.pop("brier_score")
    assert {name: score.metrics[name] for name in expected} == expected
    assert score.metrics["brier_score"] == pytest.approx(brier, rel=1e-5)
    assert 0 < expected["acc_norm"] < 1, "a score that a constant answer would not have"
    assert (score.step, score.task, score.samples, score.limit) == (2, "small_choice", len(QUESTIONS), None)
    assert len(score.content_sha256) == 64
    assert score.errors.keys() >= {"acc", "acc_norm"}
    assert f"step 2: small_choice acc {expected['acc']:.4f} ± " in said
    # By name in a folder, with fewer samples: a record of its own, of other content.
    succeeded(
        "evaluate", own_run.folder, "--tasks", "small_choice", "--include", tmp_path / "tasks", "--limit", "3"
    )
    [limited] = scores(own_run)
    assert (limited.samples, limited.limit) == (3, 3)
    assert limited.content_sha256 != score.content_sha256


@needs_harness
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tasks_that_are_missing_or_need_the_hub_are_one_line(
    own_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    task = write_task(tmp_path / "tasks")
    task.write_text(task.read_text().replace("dataset_path: json", "dataset_path: nobody/nothing"))
    said = refusal("evaluate", own_run.folder, "--tasks", task, remarks=1)
    assert f"task {task} needs data from the Hugging Face hub, which cannot be had here" in said
    said = refusal("evaluate", own_run.folder, "--tasks", "arc_eazy", remarks=1)
    assert "task arc_eazy is unknown; did you mean arc_easy" in said
    assert not (own_run.folder / FILE).exists()


def test_what_cannot_be_scored_is_one_line(
    own_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no-such.yaml does not exist" in refusal("evaluate", own_run.folder, "--tasks", "no-such.yaml")
    assert "--tasks names no task" in refusal("evaluate", own_run.folder, "--tasks", " , ")
    assert "--device tpu: accepted: auto" in refusal(
        "evaluate", own_run.folder, "--tasks", "a", "--device", "tpu"
    )
    assert "--include nowhere: accepted: a folder" in refusal(
        "evaluate", own_run.folder, "--tasks", "a", "--include", "nowhere"
    )
    monkeypatch.setattr(evaluation, "find_spec", lambda package: None)
    said = refusal("evaluate", own_run.folder, "--tasks", "arc_easy")
    assert said == "asyncpp: error: evaluate needs the package lm_eval: pip install 'asyncpp[eval]'\n"
    monkeypatch.setattr(evaluation, "find_spec", lambda package: package)
    assert "--site local is this machine" in refusal(
        "evaluate", own_run.folder, "--tasks", "arc_easy", "--site", "local"
    )
    shutil.rmtree(own_run.checkpoints)
    assert "has no checkpoint yet" in refusal("evaluate", own_run.folder, "--tasks", "arc_easy")


def test_scores_are_columns_and_curves_and_those_of_another_run_are_named(own_run: Run, quick: None) -> None:
    succeeded("evaluate", own_run.folder, "--tasks", "small,other task")
    again = asyncpp("evaluate", own_run.folder, "--tasks", "small,other task")
    assert (again.code, again.output) == (0, "")
    assert "step 2: scored already" in again.errors
    experiment = own_run.folder.parent.parent
    [cell] = cells_of(experiment)
    assert cell["score.small.acc"] == 0.25
    assert cell["score.small.acc.error"] == 0.1
    assert cell["score.small.acc_norm"] == 0.5
    assert (cell["score.small.step"], cell["score.other task.step"]) == (2, 2)
    report = report_of(experiment)
    drawn = charts(report.cells)
    assert [list(line.y) for line in drawn["score-small"].lines] == [[0.5]]
    assert "score-other-task" in drawn
    assert "acc_norm" in succeeded("report", experiment).output
    rows = api.open(experiment).scores().rows(named=True)
    assert [row["metric"] for row in rows] == ["acc", "acc_norm"] * 2
    assert (rows[0]["run"], rows[0]["value"], rows[0]["error"], rows[1]["error"]) == (
        own_run.id,
        0.25,
        0.1,
        None,
    )
    file = own_run.folder / FILE
    [line, _] = file.read_text().splitlines()
    file.write_text(line.replace(own_run.id, "another") + "\n" + line.replace("0.25", "0.75") + "\n{\n")
    [cell] = cells_of(experiment)
    assert "score.small.acc" not in cell
    [renamed, edited, torn] = report_of(experiment).cells[0].runs[0].problems
    # The checksum of a line holds for its whole text.
    assert all("line" in problem and "left out" in problem for problem in (renamed, edited, torn))
    owner = owners_of(own_run)[0]
    unsealed = line.partition(', "checksum"')[0] + "}"
    file.write_text(unsealed.replace(owner.config_sha256, "0" * 64))
    _, [problem] = scores_of(own_run, owner)
    assert f"has scores of run {own_run.id} (configuration 00000000)" in problem


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_left_out(
    own_run: Run, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = evaluation.export_run

    def replaced(run: Run, folder: Path, *, step: int) -> tuple[int, int]:
        if step == 3:  # stands for a checkpoint of this step
            shutil.copytree(run.checkpoints / "step-3", run.checkpoints / "step-2")
        else:
            shutil.move(run.checkpoints / "step-2", run.checkpoints / "step-3")
        return real(run, folder, step=2)

    monkeypatch.setattr(evaluation, "export_run", replaced)
    [score] = evaluate_run(own_run, Asked(tasks=("small",)), every_checkpoint=False, follow=False)
    assert score.step == 3, "the newer one is scored"
    assert "step 2: its checkpoint was replaced by a newer one while it was read" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_trains_is_not_disturbed(tmp_path: Path, quick: None) -> None:
    """It keeps one checkpoint, which is replaced at every other step."""
    changes = [
        *("model=micro", "data.context=16", "train.microbatch_size=1", "train.eval_microbatches=1"),
        *("train.steps=60", "train.checkpoint_interval=2", "train.eval_interval=30"),
        *("site.keep_checkpoints=1", "matrix={schedule: 2bw, optimizer: adamw}", "exclude=[]"),
    ]
    followed, alone = tmp_path / "followed", tmp_path / "alone"
    for folder in (followed, alone):
        succeeded("sweep", "quickstart", *changes, "--out", folder)
    [run] = open_experiment(followed).runs
    command = [sys.executable, "-P", "-m", "asyncpp_cli", "launch", str(followed)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as launch:
        found = [*evaluate_run(run, Asked(tasks=("small",)), every_checkpoint=True, follow=True)]
        assert launch.wait(timeout=300) == 0
    assert [score.step for score in found] == sorted({score.step for score in found})
    assert found[-1].step == 60
    assert scores(run) == found
    train_all(alone)
    [other] = open_experiment(alone).runs
    same = ("step", "val_loss", "weights_sha256", "train_loss")
    ours, theirs = (
        [
            {name: row.get(name) for name in same}
            for row in each.metrics()
            if row["kind"] in ("step", "eval", "end")
        ]
        for each in (run, other)
    )
    assert ours == theirs
