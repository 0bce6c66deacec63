"""`data.validation`: from the template to the report."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import polars as pl
import pytest
from support.command_line import succeeded
from support.files import ROOT
from support.launches import train_all
from support.report_experiment import cells_of, report_of
from support.rows import plain

from asyncpp import Experiment
from asyncpp_cli.report.formats.charts import charts
from asyncpp_cli.runs.experiment_folder import open_experiment

TEXTS = ROOT / "tests" / "support" / "prose"

TEMPLATE = """
matrix: {schedule: [1f1b, 2bw], optimizer: [sgd], seed: [0, 1]}
model: micro
schedule.microbatches: 2
data:
  path: texts
  context: 16
  validation_share: 0.3
  validation: {wiki: wiki.txt, code: code}
train: {steps: 3, microbatch_size: 2, eval_microbatches: 2, eval_interval: 2}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: None) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TEXTS, "texts")
    Path("wiki.txt").write_text("an encyclopedia of pipelines " * 20)
    Path("code").mkdir()
    Path("code/a.py").write_text("def stage(x): return x + 1\n" * 20)
    Path("mine.yaml").write_text(TEMPLATE)
    return tmp_path


def ids(experiment: str) -> list[str]:
    return [cell.id for cell in open_experiment(Path(experiment)).cells]


@pytest.mark.slow
def test_a_report_has_each_set(folder: Path) -> None:
    succeeded("sweep", "mine.yaml", "--out", "e")
    train_all("e")
    sync, delayed = cells_of(folder / "e")
    runs = open_experiment(folder / "e").runs
    rows = {run.id: [row for row in plain(run) if row["kind"] == "eval"][-1] for run in runs}
    for name in ("data", "wiki", "code"):
        losses = {run: row["sets"][name]["val_loss"] for run, row in rows.items()}
        means = [sum(losses[run] for run in cell["runs"]) / 2 for cell in (sync, delayed)]
        assert [sync[f"{name}.val_loss"], delayed[f"{name}.val_loss"]] == pytest.approx(means)
        assert delayed[f"{name}.gap"] == pytest.approx(means[1] - means[0])
        assert delayed[f"{name}.gap_low"] <= delayed[f"{name}.gap"] <= delayed[f"{name}.gap_high"]
        assert sync[f"{name}.gap"] is None
        # Text is read as bytes: nats over ln 2.
        assert sync[f"{name}.bits_per_byte"] == pytest.approx(means[0] / 0.6931471805599453)
        assert sync[f"{name}.val_loss_error"] > 0
    assert (sync["data.val_loss"], delayed["data.gap"]) == (sync["val_loss"], delayed["gap"])
    report = report_of(folder / "e", keep_steps=True)
    drawn = charts(report)
    assert {"validation-loss-wiki", "validation-loss-code"} <= drawn.keys()
    assert drawn["validation-loss-wiki"].lines
    assert "validation-loss-data" not in drawn
    [said] = [line for line in report.conditions if line.startswith("Read in an evaluation")]
    # Each file counts in full, less the last token, in whole micro-batches of two sequences of 16.
    assert said.startswith("Read in an evaluation: data 64 of ")
    assert said.endswith(" tokens, wiki 576 of 580 tokens, code 512 of 540 tokens")
    [said] = [line for line in report.conditions if "Standard error" in line]
    assert "over seeds, of a mean: " in said
    table = succeeded("report", "e").output
    assert "wiki" in table
    [header, *_] = csv.reader(io.StringIO(succeeded("report", "e", "--format", "csv").output))
    assert {"wiki.val_loss", "wiki.val_loss_std", "code.gap_low"} <= set(header)
    by_schedule = succeeded("report", "e", "--value", "code.gap", "--cols", "schedule").output
    assert "Each entry: code gap" in by_schedule
    steps = Experiment("e").steps()
    assert steps["set"].value_counts().height == 4
    assert steps.filter(pl.col("set") == "wiki").height == 2 * len(rows)


def test_rows_of_another_set_are_damaged(folder: Path) -> None:
    succeeded("sweep", "mine.yaml", "matrix.seed=[0]", "matrix.schedule=[1f1b]", "--out", "e")
    [run] = open_experiment(folder / "e").runs
    succeeded("train", run.folder, "--replay")
    lines = run.metrics_file.read_text().splitlines()[:-1]  # the last has the file's checksum
    [start] = [json.loads(line) for line in lines if '"kind": "start"' in line]
    text = "\n".join(lines).replace(start["validation"]["code"]["sha256"], "0" * 64)
    run.metrics_file.write_text(text + "\n")
    run.status_file.unlink()
    shutil.rmtree(run.attempts)  # they would tell how it ended
    [cell] = cells_of(folder / "e")
    assert cell["status"] == "damaged"
    assert "another validation set code" in cell["reason"]


def test_runs_without_the_sets_that_a_template_names_are_those_of_one_without(folder: Path) -> None:
    succeeded("sweep", "mine.yaml", "data.validation.wiki=null", "data.validation.code=null", "--out", "d")
    Path("plain.yaml").write_text(TEMPLATE.replace("  validation: {wiki: wiki.txt, code: code}\n", ""))
    succeeded("sweep", "plain.yaml", "--out", "plain")
    assert ids("d") == ids("plain")
