"""`asyncpp report` on whole experiment folders, sound and damaged, through the real command line."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from report_experiment import ExperimentFolder, metrics, settings
from rich.console import Console

from asyncpp_cli.cluster.attempts import claim
from asyncpp_cli.cluster.processes import this_process
from asyncpp_cli.report.aggregate import aggregate
from asyncpp_cli.report.load import load
from asyncpp_cli.report.render import Report, to_csv, to_json, to_markdown, to_table, to_text
from asyncpp_cli.runs import State, Status, open_experiment

REQUIRED_KEYS = {
    *("schedule", "optimizer", "error_feedback", "model", "status", "n"),
    *("val_loss", "gap", "tokens_per_second", "throughput_ratio", "delay", "bubble"),
}

LOSSES = {
    ("1f1b", "adamw", 0.0): 2.218,
    ("1f1b", "muon", 0.0): 2.060,
    ("2bw", "adamw", 0.0): 2.449,
    ("2bw", "adamw", 1.0): 2.319,
    ("2bw", "muon", 0.0): 2.121,
    ("2bw", "muon", 1.0): 2.080,
}


def asyncpp(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "asyncpp_cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def report_of(folder: Path) -> Report:
    experiment = open_experiment(folder)
    cells, notes = aggregate(load(experiment))
    return Report(name=experiment.name, cells=cells, notes=notes)


def cells_of(folder: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(to_json(report_of(folder)))
    return cells


@pytest.fixture
def quickstart(tmp_path: Path) -> ExperimentFolder:
    """Six cells of two seeds, with numbers of their own in every run."""
    experiment = ExperimentFolder(tmp_path / "experiment", name="quickstart")
    for (schedule, optimizer, error_feedback), loss in LOSSES.items():
        for seed in range(2):
            delay = int(schedule == "2bw")
            rows = metrics(
                val_losses=(4.0, loss + 0.013 * seed),
                steady=((20000 + 7000 * delay + seed, 2.0), (11000 + 3000 * delay, 1.0 + seed / 7)),
                busy=((0.95, 0.9), (0.9, 0.94)) if delay else ((0.7, 0.68), (0.66, 0.71)),
                delay=delay,
            )
            experiment.add(settings(schedule, optimizer, error_feedback, seed), rows=rows)
    return experiment


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


def test_json_has_the_keys_that_scripts_rely_on(quickstart: ExperimentFolder) -> None:
    first = cells_of(quickstart.folder)[0]
    assert first.keys() >= REQUIRED_KEYS
    assert first["error_feedback"] is False
    assert first["unigram_bits_per_byte"] == 4.83
    assert first["conditions"]["torch"] == "2.13.0"
    assert first["conditions"]["tokens_per_step"] == 2048


@pytest.mark.parametrize(("coefficient", "shown"), [(0.0, False), (1.0, True), (0.5, 0.5)])
def test_error_feedback_is_a_switch_or_a_number(tmp_path: Path, coefficient: float, shown: Any) -> None:
    experiment = ExperimentFolder(tmp_path / "experiment")
    experiment.add(settings("2bw", "muon", coefficient))
    value = cells_of(experiment.folder)[0]["error_feedback"]
    assert (value, type(value)) == (shown, type(shown))


def test_csv_has_the_numbers_of_the_json(quickstart: ExperimentFolder) -> None:
    lines = list(csv.DictReader(io.StringIO(to_csv(report_of(quickstart.folder)))))
    for line, cell in zip(lines, cells_of(quickstart.folder), strict=True):
        for name in ("val_loss", "val_loss_std", "gap", "tokens_per_second", "throughput_ratio", "bubble"):
            assert (None if line[name] == "" else float(line[name])) == cell[name]


def test_table_and_markdown_show_the_numbers_of_the_json(quickstart: ExperimentFolder) -> None:
    report = report_of(quickstart.folder)
    cell = cells_of(quickstart.folder)[2]
    assert (cell["schedule"], cell["optimizer"], cell["error_feedback"]) == ("2bw", "adamw", False)
    numbers = [
        f"{cell['val_loss']:.3f}±{cell['val_loss_std']:.3f}",
        f"{cell['gap']:+.3f}",
        f"{cell['tokens_per_second']:,.0f}",
        f"{cell['throughput_ratio']:.2f}",
        f"{cell['bubble']:.0%} (0%)",
    ]
    for text in (to_text(report), to_markdown(report)):
        [line] = [line for line in text.splitlines() if re.match(r"\W*2bw\W+adamw\W+off", line)]
        assert [number for number in numbers if number not in line] == []


def test_table_is_at_most_120_columns_and_says_its_conditions(quickstart: ExperimentFolder) -> None:
    text = to_text(report_of(quickstart.folder))
    assert max(map(len, text.splitlines())) <= 120
    assert "2 micro-batches x 8 sequences x 128 tokens = 2,048 tokens a step" in text
    assert "torch 2.13.0" in text
    assert "host node7, device cpu" in text


def test_replayed_runs_have_no_throughput_and_say_so(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "experiment")
    rows = metrics(steady=((0, 0.0), (0, 0.0)), busy=((), ()))
    rows[0]["replayed"] = True
    experiment.add(settings("1f1b", "muon"), rows=rows)
    [cell] = cells_of(experiment.folder)
    assert (cell["tokens_per_second"], cell["bubble"], cell["val_loss"]) == (None, None, 3.0)
    assert "Replayed runs" in to_text(report_of(experiment.folder))


def test_a_narrow_terminal_sees_every_number_uncut(quickstart: ExperimentFolder) -> None:
    stream = io.StringIO()
    to_table(report_of(quickstart.folder), console=Console(file=stream, width=80, color_system=None))
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert all(f"{cell['gap']:+.3f}" in text for cell in cells_of(quickstart.folder) if cell["gap"])
    assert "In every row: model nano, status completed, n 2" in text


def test_a_terminal_that_is_too_narrow_still_sees_every_number(quickstart: ExperimentFolder) -> None:
    stream = io.StringIO()
    to_table(report_of(quickstart.folder), console=Console(file=stream, width=40, color_system=None))
    assert "…" not in stream.getvalue()
    assert all(
        f"{cell['gap']:+.3f}" in stream.getvalue() for cell in cells_of(quickstart.folder) if cell["gap"]
    )


def test_every_cell_is_shown_whatever_became_of_it(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "experiment")
    experiment.add(settings("1f1b", "muon"))
    killed = Status(state=State.FAILED, attempt=1, step=2, steps=4, reason="rank 1 was killed by SIGKILL")
    experiment.add(settings("2bw", "muon"), status=killed)
    going_on = experiment.add(settings("2bw", "adamw"), status=Status())
    attempt = claim(going_on, processes=1, replay=True, steps=4)
    assert attempt is not None
    attempt.rank_started(0, this_process())
    experiment.add(settings("gpipe", "muon"), status=Status())
    gone = experiment.add(settings("gpipe", "adamw"))
    for file in gone.folder.iterdir():
        file.unlink()
    gone.folder.rmdir()
    cells = cells_of(experiment.folder)
    assert [cell["status"] for cell in cells] == ["completed", "failed", "running", "pending", "missing"]
    assert "SIGKILL" in cells[1]["reason"]
    assert (cells[4]["schedule"], cells[4]["optimizer"], cells[4]["val_loss"]) == ("gpipe", "adamw", None)
    assert "rank 1 was killed by SIGKILL" in to_text(report_of(experiment.folder))
    assert "rank 1 was killed by SIGKILL" in to_markdown(report_of(experiment.folder))


def test_a_run_whose_process_has_vanished_is_not_called_running(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "experiment")
    run = experiment.add(settings("2bw", "adamw"), status=Status())
    code = (
        "import sys; from pathlib import Path; from asyncpp_cli.cluster.attempts import claim; "
        "from asyncpp_cli.cluster.processes import this_process; from asyncpp_cli.runs import open_run; "
        "attempt = claim(open_run(Path(sys.argv[1])), processes=1, replay=True, steps=4); "
        "attempt.rank_started(0, this_process())"
    )
    subprocess.run([sys.executable, "-c", code, str(run.folder)], check=True, timeout=60)
    [cell] = cells_of(experiment.folder)
    assert cell["status"] == "failed"
    assert "rank 0" in cell["reason"]


def damage_nothing_but_the_last_line(run: Path) -> None:
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[:-20])


def remove_metrics(run: Path) -> None:
    (run / "metrics.jsonl").unlink()


def remove_config(run: Path) -> None:
    (run / "config.yaml").unlink()


def spoil_config(run: Path) -> None:
    (run / "config.yaml").write_text("train: [1, 2")


def spoil_status(run: Path) -> None:
    (run / "status.json").write_text('{"format": 1, "sta')


def make_status_newer(run: Path) -> None:
    content = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(content | {"format": 99}))


def spoil_a_row(run: Path) -> None:
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace('"steady_seconds": 2.0', '"steady_seconds": "long"'))


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (remove_metrics, "metrics.jsonl"),
        (remove_config, "config.yaml"),
        (spoil_config, "config.yaml"),
        (spoil_status, "status.json"),
        (make_status_newer, "status.json"),
        (spoil_a_row, "metrics.jsonl"),
    ],
)
def test_a_damaged_run_is_reported_and_the_rest_unharmed(
    quickstart: ExperimentFolder, damage: Any, file: str
) -> None:
    whole = cells_of(quickstart.folder)
    damage(quickstart.folder / "runs" / quickstart.cells[-1].id)
    *others, damaged = cells_of(quickstart.folder)
    assert others == whole[:-1]
    assert (damaged["schedule"], damaged["status"], damaged["n"]) == ("2bw", "unreadable", 1)
    assert file in damaged["reason"]
    assert file in re.sub(r"\s", "", to_text(report_of(quickstart.folder)))


def test_a_torn_last_line_costs_that_line_alone(quickstart: ExperimentFolder) -> None:
    whole = cells_of(quickstart.folder)
    damage_nothing_but_the_last_line(quickstart.folder / "runs" / quickstart.cells[0].id)
    assert cells_of(quickstart.folder) == whole
    printed = asyncpp("report", quickstart.folder)
    assert "1 line(s) cut off" in " ".join(printed.stdout.split())


def test_a_diverged_run_is_null_in_json_and_named_in_the_table(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "experiment")
    experiment.add(settings("1f1b", "muon"))
    experiment.add(settings("2bw", "muon"), rows=metrics(val_losses=(4.0, math.nan), delay=1))
    [_, diverged] = cells_of(experiment.folder)
    assert (diverged["val_loss"], diverged["gap"], diverged["status"]) == (None, None, "completed")
    assert "nan" in to_text(report_of(experiment.folder))


def test_repeated_steps_count_once(tmp_path: Path) -> None:
    """A run that was killed and begun again: only the second attempt's rows count."""
    experiment = ExperimentFolder(tmp_path / "experiment")
    first = metrics(val_losses=(9.0, 9.0), steady=((1, 100.0), (1, 100.0)))[:6]
    experiment.add(settings("1f1b", "muon"), rows=[*first, *metrics(val_losses=(4.0, 3.0))])
    [cell] = cells_of(experiment.folder)
    assert (cell["val_loss"], cell["tokens_per_second"]) == (3.0, 1000.0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings_of_hypothesis(max_examples=60, deadline=None)
@given(place=st.integers(0, 100), field=st.integers(0, 100), value=JSON, remove=st.booleans())
def test_no_row_whatever_it_holds_stops_the_report(place: int, field: int, value: Any, remove: bool) -> None:
    rows = metrics()
    row = rows[place % len(rows)]
    name = list(row)[field % len(row)]
    if remove:
        del row[name]
    else:
        row[name] = value
    with tempfile.TemporaryDirectory() as folder:
        experiment = ExperimentFolder(Path(folder) / "experiment")
        experiment.add(settings("1f1b", "muon"), rows=rows)
        experiment.add(settings("2bw", "muon"))
        report = report_of(experiment.folder)
        cells = json.loads(to_json(report))
        assert cells[1]["val_loss"] == 3.0
        assert cells[0]["status"] in ("completed", "unreadable")
        for text in (to_text(report), to_markdown(report), to_csv(report)):
            assert "2bw" in text


HOSTILE = "<script>alert(1)</script>|[bold]\x1b[31m`x`"


def test_names_with_markup_do_no_harm(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "experiment", name=HOSTILE)
    failed = Status(state=State.FAILED, reason=HOSTILE)
    experiment.add(settings("2bw", "muon", **{"model.name": HOSTILE}), status=failed)
    report = report_of(experiment.folder)
    markdown = to_markdown(report)
    assert "<script>" not in markdown
    [row] = [line for line in markdown.splitlines() if line.startswith("| 2bw")]
    assert len(re.findall(r"(?<!\\)\|", row)) == len(re.findall(r"(?<!\\)\|", markdown.splitlines()[2]))
    assert "\x1b" not in to_text(report) + markdown
    assert "[bold]" in to_text(report)
    assert json.loads(to_json(report))[0]["model"] == HOSTILE


def test_command_writes_json_alone_to_standard_output(quickstart: ExperimentFolder) -> None:
    done = asyncpp("report", quickstart.folder, "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == cells_of(quickstart.folder)


@pytest.mark.parametrize("output_format", ["table", "markdown", "csv", "json"])
def test_out_holds_what_standard_output_would(
    quickstart: ExperimentFolder, tmp_path: Path, output_format: str
) -> None:
    file = tmp_path / "report.txt"
    file.write_text("an older report")
    printed = asyncpp("report", quickstart.folder, "--format", output_format)
    written = asyncpp("report", quickstart.folder, "--format", output_format, "--out", file)
    assert (printed.returncode, written.returncode) == (0, 0)
    assert written.stdout == ""
    assert file.read_text() == printed.stdout
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.txt"]


def mistakes(folder: Path) -> Mapping[str, tuple[list[str | Path], str]]:
    return {
        "no experiment": ([folder / "nowhere"], "nowhere is not an experiment"),
        "out is a folder": ([folder, "--out", folder], "give the name of a file"),
        "out has no folder": ([folder, "--out", folder / "no" / "such.md"], "cannot be written"),
    }


@pytest.mark.parametrize("mistake", ["no experiment", "out is a folder", "out has no folder"])
def test_mistakes_are_one_line_and_exit_code_2(quickstart: ExperimentFolder, mistake: str) -> None:
    arguments, message = mistakes(quickstart.folder)[mistake]
    done = asyncpp("report", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_report_needs_no_torch(quickstart: ExperimentFolder) -> None:
    code = (
        "import sys; from pathlib import Path; from asyncpp_cli.commands.report import Format, report; "
        f"report(Path({str(quickstart.folder)!r}), Format.JSON, None); "
        "assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)
