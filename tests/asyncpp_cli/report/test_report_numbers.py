"""The numbers of a report, recomputed from the raw metrics, and alike in every form."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from rich.console import Console
from support.report_experiment import ExperimentFolder, cells_of, metrics, report_of, settings

from asyncpp_cli.report.formats.records import to_csv
from asyncpp_cli.report.formats.text import to_table, to_text

REQUIRED_KEYS = {
    *("schedule", "optimizer", "error_feedback", "model", "status", "n"),
    *("val_loss", "gap", "tokens_per_second", "throughput_ratio", "delay", "bubble"),
}


def recomputed(folder: Path) -> dict[tuple[str, str, float], dict[str, float]]:
    """The numbers of each cell straight from the lines of metrics.jsonl, by other code than the report's."""
    of_cell: dict[tuple[str, str, float], list[list[dict[str, Any]]]] = {}
    for cell in json.loads((folder / "experiment.json").read_text())["cells"]:
        lines = (folder / "runs" / cell["id"] / "metrics.jsonl").read_text().splitlines()
        key = tuple(cell["axes"][axis] for axis in ("schedule", "optimizer", "error_feedback"))
        of_cell.setdefault(key, []).append([json.loads(line) for line in lines])
    numbers = {}
    for key, runs in of_cell.items():
        losses, speeds, waits = [], [], []
        for rows in runs:
            losses.append([row["val_loss"] for row in rows if row["kind"] == "eval"][-1])
            cut = [row for row in rows if row["kind"] == "segment"]
            window = sum(row["steady_seconds"] for row in cut)
            speeds.append(sum(row["steady_tokens"] for row in cut) / window)
            busy = [sum(row["busy"][rank] * row["steady_seconds"] for row in cut) for rank in (0, 1)]
            waits.append(1 - (busy[0] + busy[1]) / 2 / window)
        numbers[key] = {
            "val_loss": sum(losses) / 2,
            "val_loss_std": abs(losses[0] - losses[1]) / math.sqrt(2),
            "bits_per_byte": sum(losses) / 2 / math.log(2),
            "tokens_per_second": sum(speeds) / 2,
            "bubble": sum(waits) / 2,
        }
    return numbers


def test_json_numbers_are_those_of_the_raw_metrics(quickstart: ExperimentFolder) -> None:
    expected = recomputed(quickstart.folder)
    cells = cells_of(quickstart.folder)
    assert len(cells) == 6
    assert cells[0].keys() >= REQUIRED_KEYS
    assert (cells[0]["error_feedback"], cells[0]["unigram_bits_per_byte"]) == (0.0, 4.83)
    assert (cells[0]["conditions"]["torch"], cells[0]["conditions"]["tokens_per_step"]) == ("2.13.0", 2048)
    for cell in cells:
        key = (cell["schedule"], cell["optimizer"], float(cell["error_feedback"]))
        for name, value in expected[key].items():
            assert cell[name] == pytest.approx(value, rel=1e-12), (key, name)
        base = expected["1f1b", cell["optimizer"], 0.0]
        if cell["schedule"] == "2bw":
            assert cell["gap"] == pytest.approx(expected[key]["val_loss"] - base["val_loss"], rel=1e-9)
            ratio = expected[key]["tokens_per_second"] / base["tokens_per_second"]
            assert cell["throughput_ratio"] == pytest.approx(ratio, rel=1e-12)
        assert cell["delay"] == (1 if cell["schedule"] == "2bw" else 0)
        assert (cell["status"], cell["n"]) == ("completed", 2)


def test_averages_of_weights_have_a_loss_and_a_gap_of_their_own(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "experiment")
    for schedule, losses in (("1f1b", (2.0, 2.25)), ("2bw", (2.5, 3.25))):
        for seed, loss in enumerate(losses):
            rows = [
                {**row, "val_loss_ema": loss} if row["kind"] == "eval" else row
                for row in metrics(delay=int(schedule == "2bw"))
            ]
            experiment.add(settings(schedule, "adamw", seed=seed, **{"train.ema_decay": 0.9}), rows=rows)
    sync, delayed = cells_of(experiment.folder)
    assert (sync["val_loss_ema"], delayed["val_loss_ema"]) == (2.125, 2.875)
    assert (sync["gap_ema"], delayed["gap_ema"], delayed["gap"]) == (None, 0.75, 0.0)
    assert delayed["gap_ema_low"] < 0.75 < delayed["gap_ema_high"]
    assert "EMA" in to_text(report_of(experiment.folder))
    experiment.add(
        settings("2bw", "muon"),
        rows=[{**row, "val_loss_ema": -1.0} if row["kind"] == "eval" else row for row in metrics(delay=1)],
    )
    assert "the validation loss of step 2 is -1.0" in cells_of(experiment.folder)[-1]["reason"]


def test_error_feedback_is_a_number_and_so_a_column_of_one_type(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "experiment")
    for coefficient in (0.0, 1.0, 0.5):
        experiment.add(settings("2bw", "muon", coefficient))
    report = report_of(experiment.folder)
    assert [cell["error_feedback"] for cell in cells_of(experiment.folder)] == [0.0, 1.0, 0.5]
    assert pl.read_csv(to_csv(report).encode())["error_feedback"].to_list() == [0.0, 1.0, 0.5]


def test_table_is_at_most_120_columns_and_says_its_conditions(quickstart: ExperimentFolder) -> None:
    text = to_text(report_of(quickstart.folder))
    assert max(map(len, text.splitlines())) <= 120
    assert "2 micro-batches x 8 sequences x 128 tokens = 2,048 tokens per step" in text
    assert "torch 2.13.0" in text
    assert "host node7, device cpu" in text
    # Of 4 steps and 800,000 parameters.
    assert "A short run (0.01 tokens per parameter;" in " ".join(text.split())


def test_what_was_not_measured_as_usual_is_said(tmp_path: Path) -> None:
    replayed, unknown = ExperimentFolder(tmp_path / "replayed"), ExperimentFolder(tmp_path / "unknown")
    start, *rows = metrics(steady=((0, 0.0), (0, 0.0)), busy=((), ()))
    replayed.add(settings("1f1b", "muon"), rows=[start | {"replayed": True}, *rows])
    [cell] = cells_of(replayed.folder)
    assert (cell["tokens_per_second"], cell["bubble"], cell["val_loss"]) == (None, None, 3.0)
    assert "Replayed runs" in to_text(report_of(replayed.folder))

    said = "Runs on token shards of unknown bytes per token"
    unknown.add(settings("1f1b", "muon"))
    assert said not in to_text(report_of(unknown.folder))
    start, *rows = metrics()
    bytes_unknown = {"bytes_per_token": None, "unigram_bits_per_byte": None}
    unknown.add(settings("2bw", "muon"), rows=[start | bytes_unknown, *rows])
    assert said in to_text(report_of(unknown.folder))


def test_the_first_step_of_compiled_runs_is_named_apart_from_their_throughput(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "experiment")
    for seed, warm_up in enumerate((30.0, 32.0)):
        start, *rows = metrics()
        compiled = {"compiled": True, "warm_up_seconds": warm_up}
        experiment.add(settings("1f1b", "muon", seed=seed), rows=[start | compiled, *rows])
    text = to_text(report_of(experiment.folder))
    # The first row of a step is of second 1.5.
    assert "Blocks were compiled: the first step took 31.5 to 33.5 s, which throughput leaves out." in text
    [cell] = cells_of(experiment.folder)
    assert (cell["first_step_seconds"], cell["tokens_per_second"]) == (32.5, 1000.0)


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_sees_every_number_uncut(quickstart: ExperimentFolder, width: int) -> None:
    stream = io.StringIO()
    to_table(report_of(quickstart.folder), console=Console(file=stream, width=width, color_system=None))
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= max(width, 80)
    assert "…" not in text
    assert all(f"{cell['gap']:+.3f}" in text for cell in cells_of(quickstart.folder) if cell["gap"])
    assert "model nano, status completed, n 2" in " ".join(text.split())
