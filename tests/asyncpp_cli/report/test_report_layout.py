"""Which columns a table has, and how `--rows`, `--cols` and `--value` lay cells out."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from support.command_line import asyncpp
from support.report_experiment import ExperimentFolder, metrics, quickstart_folder, report_of, settings

from asyncpp_cli.report.analysis.aggregate import aggregate
from asyncpp_cli.report.formats.text import to_markdown, to_text
from asyncpp_cli.report.load.experiments import load
from asyncpp_cli.report.tables.document import Report
from asyncpp_cli.runs.experiment_folder import Experiment, open_experiment
from asyncpp_cli.runs.status import State, Status


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six cells of the quickstart, and a failed one of another model."""
    experiment = quickstart_folder(tmp_path_factory.mktemp("layout") / "experiment")
    failed = Status(state=State.FAILED, attempt=3, step=1, steps=4, reason="lost")
    experiment.add(settings("2bw", "soap"), status=failed)
    return experiment.folder


def laid_out(
    folder: Path, *, rows: tuple[str, ...] = (), cols: tuple[str, ...] = (), values: str = "val_loss"
) -> Report:
    plain = report_of(folder)
    return Report(name="x", cells=plain.cells, notes=[], rows=rows, cols=cols, values=values)


def test_cells_lie_side_by_side_with_their_runs_and_states(folder: Path) -> None:
    table = laid_out(folder, rows=("schedule", "error_feedback"), cols=("optimizer",)).table(width=None)
    assert [heading.title for heading in table.headings] == ["schedule", "EF", "adamw", "muon", "soap"]
    by_row = {tuple(row[:2]): list(row[2:]) for row in table.rows}
    assert by_row["2bw", "off"] == ["2.455±0.083 (2)", "2.127±0.083 (2)", "failed"]
    assert by_row["1f1b", "off"][2] == ""


def test_keys_in_neither_rows_nor_columns_still_distinguish_rows(folder: Path) -> None:
    table = laid_out(folder, cols=("schedule",)).table(width=None)
    assert [heading.title for heading in table.headings] == ["optimizer", "EF", "1f1b", "2bw"]
    assert len({tuple(row[:2]) for row in table.rows}) == len(table.rows) == 5


def test_several_values_stand_side_by_side(folder: Path) -> None:
    report = laid_out(folder, rows=("optimizer",), cols=("schedule", "error_feedback"), values="val_loss,gap")
    table = report.table(width=None)
    assert [heading.title.split("\n")[:2] for heading in table.headings[1:3]] == [["1f1b", "EF off"]] * 2
    [muon] = [row for row in table.rows if row[0] == "muon"]
    assert "+0.061±0.000" in muon
    for text in (to_text(report), to_markdown(report)):
        assert "+0.061±0.000" in text
        assert "Each entry: val loss nats/tok., gap (delayed - sync)" in text


def test_numbers_stand_side_by_side_by_their_size(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path)
    for schedule, rate, coefficient in (("2bw", 0.01, 0.5), ("2bw", 0.002, 1.0), ("1f1b", 0.002, 0.0)):
        cell = settings(schedule, "muon", coefficient, **{"optimizer.lr": rate})
        experiment.add(cell, axes={"optimizer.lr": rate})
    for keys, titles in (
        (("optimizer.lr",), ["optimizer.lr 0.002", "optimizer.lr 0.01"]),
        (("error_feedback",), ["EF off", "EF 0.5", "EF on"]),
        (("schedule",), ["2bw", "1f1b"]),
    ):
        table = laid_out(tmp_path, rows=("optimizer",), cols=keys).table(width=None)
        assert [heading.title for heading in table.headings][-len(titles) :] == titles


def test_rows_alone_lead_the_table(folder: Path) -> None:
    table = laid_out(folder, rows=("optimizer",)).table(width=None)
    assert table.headings[0].title == "optimizer"
    assert len(table.rows) == 7


@pytest.mark.slow
def test_csv_is_laid_out_in_plain_numbers(folder: Path) -> None:
    words = ("--format", "csv", "--rows", "optimizer", "--cols", "schedule", "--value", "val_loss")
    printed = asyncpp("report", folder, *words)
    lines = list(csv.DictReader(io.StringIO(printed.output)))
    [plain] = [line for line in lines if (line["optimizer"], line["error_feedback"]) == ("adamw", "off")]
    cells = {(cell.schedule, cell.optimizer, cell.error_feedback): cell for cell in report_of(folder).cells}
    expected = cells["2bw", "adamw", 0.0].val_loss
    found = float(plain["2bw val_loss"]), float(plain["2bw val_loss_std"])
    assert found == (expected.mean, expected.std)
    assert (plain["2bw n"], plain["2bw status"]) == ("2", "completed")


def test_columns_that_nothing_was_measured_of_are_not_there(folder: Path, tmp_path: Path) -> None:
    keys = {heading.key for heading in report_of(folder).table(width=None).headings}
    assert {"val_loss", "gap", "tokens_per_second", "perplexity", "restarts"} <= keys
    assert not {"mfu", "peak_memory_max", "target_steps"} & keys
    experiment = ExperimentFolder(tmp_path / "replayed")
    experiment.add(settings("1f1b", "muon"), rows=metrics(steady=((0, 0.0), (0, 0.0)), busy=((), ())))
    keys = {heading.key for heading in report_of(experiment.folder).table(width=None).headings}
    assert not {"tokens_per_second", "throughput_ratio", "bubble"} & keys


def test_columns_left_out_of_a_narrow_table_are_named(folder: Path) -> None:
    table = report_of(folder).table(width=104)
    kept = {heading.key for heading in table.headings}
    assert {"val_loss", "gap", "tokens_per_second", "throughput_ratio", "bubble"} <= kept
    assert table.width() <= 104
    assert "bits/byte" in table.hidden
    assert any("bits/byte" in line for line in table.remarks)
    # Those that few look at are in the other formats; restarts are shown, as there were some.
    assert not {"perplexity", "skipped_steps", "unigram_bits_per_byte"} & kept
    assert not {"perplexity", "skipped steps"} & {*table.hidden}
    assert "restarts" in {heading.key for heading in report_of(folder).table(width=400).headings}
    restarts = next(row[-1] for row in report_of(folder).table(width=None).rows if "soap" in row)
    assert restarts == "2"


@pytest.mark.slow
def test_experiments_are_taken_together_and_each_run_once(tmp_path: Path) -> None:
    """Seeds of one cell in two folders are averaged; a run that stands in both counts once."""
    folders: list[Experiment] = []
    for name, seeds in (("one", (0, 1)), ("two", (1, 2))):
        experiment = ExperimentFolder(tmp_path / name, name=name)
        for seed in seeds:
            rows = metrics(val_losses=(4.0, 2.0 + seed))
            experiment.add(settings("1f1b", "muon", seed=seed), rows=rows, run_id=f"s{seed}")
        folders.append(open_experiment(experiment.folder))
    runs, [remark] = load(folders, keep_steps=False)
    [cell], _ = aggregate(runs)
    assert (cell.n, cell.val_loss.mean) == (3, 3.0)
    assert "s1" in remark
    printed = asyncpp("report", tmp_path / "one", tmp_path / "two")
    assert printed.output.startswith("one + two\n")
    # Student's t of three seeds times 1 / √3, their deviation being 1.
    assert "3.000±2.484" in printed.output
