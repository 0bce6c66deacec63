"""`--watch` and `--figures`: reports that are written again, and pictures for papers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.image
import pytest
from support.command_line import succeeded
from support.report_experiment import ExperimentFolder, diagnostics_row, metrics, settings

from asyncpp_cli.atomic_files import write_text
from asyncpp_cli.report.analysis.aggregate import aggregate
from asyncpp_cli.report.formats.figures import write_figures
from asyncpp_cli.report.load.experiments import Loader
from asyncpp_cli.report.tables.document import Report
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.status import State, Status


def waiting(folder: Path) -> ExperimentFolder:
    """One run completed, one that has not begun."""
    experiment = ExperimentFolder(folder)
    experiment.add(settings("1f1b", "muon"))
    experiment.add(settings("2bw", "muon"), rows=metrics()[:1], status=Status(state=State.PENDING))
    return experiment


def watched(folder: Path, out: Path) -> subprocess.Popen[str]:
    command = ["report", str(folder), "--format", "json", "--out", str(out), "--watch"]
    return subprocess.Popen(
        [sys.executable, "-m", "asyncpp_cli", *command], text=True, stderr=subprocess.PIPE
    )


def wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 60
    while not file.exists():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
def test_watching_ends_when_all_runs_have_ended(tmp_path: Path) -> None:
    experiment = waiting(tmp_path / "experiment")
    out = tmp_path / "report.json"
    process = watched(experiment.folder, out)
    try:
        wait_for(out, process)
        assert [cell["status"] for cell in json.loads(out.read_text())] == ["completed", "pending"]
        run = open_experiment(experiment.folder).runs[1]
        write_text(run.metrics_file, "".join(json.dumps(row) + "\n" for row in metrics(delay=1)))
        run.write_status(Status(state=State.COMPLETED, attempt=1, step=4, steps=4))
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.communicate()
    assert [cell["status"] for cell in json.loads(out.read_text())] == ["completed", "completed"]


@pytest.mark.slow
def test_watching_ends_quietly_at_an_interrupt(tmp_path: Path) -> None:
    experiment = waiting(tmp_path / "experiment")
    out = tmp_path / "report.json"
    process = watched(experiment.folder, out)
    try:
        wait_for(out, process)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        _, said = process.communicate()
    assert "Traceback" not in said


def test_unchanged_runs_are_not_read_again(tmp_path: Path) -> None:
    experiment = waiting(tmp_path / "experiment")
    opened = open_experiment(experiment.folder)
    loader = Loader(keep_steps=False)
    (first, pending), _ = loader.load([opened])
    (again, pending_again), _ = loader.load([opened])
    assert again is first
    assert pending_again is not pending
    rows = metrics(val_losses=(4.0, 2.5))
    write_text(opened.runs[0].metrics_file, "".join(json.dumps(row) + "\n" for row in rows))
    (changed, _), _ = loader.load([opened])
    assert changed.measurement.val_loss == 2.5


HOSTILE = "$\\frac{1}{2}$ a_b^c <x>"


@pytest.mark.slow
def test_figures_are_pictures_of_each_format(tmp_path: Path) -> None:
    """Of names that look like formulas, too; and the same numbers make the same files."""
    experiment = ExperimentFolder(tmp_path / "experiment")
    for schedule in ("1f1b", "2bw"):
        for path in ("plain", HOSTILE):
            named = settings(schedule, "muon", **{"data.path": path})
            rows = metrics()
            rows[-1:-1] = [diagnostics_row(1, 30.0), diagnostics_row(2, 40.0)]
            experiment.add(named, axes={"data.path": path}, rows=rows)
    figures = tmp_path / "figures"
    done = succeeded("report", experiment.folder, "--format", "json", "--figures", figures)
    assert len(json.loads(done.output)) == 4
    names = {"training-loss", "validation-loss", "gap", "throughput", "busy", "sharpness"}
    assert {(file.stem, file.suffix) for file in figures.iterdir()} == {
        (name, suffix) for name in names for suffix in (".svg", ".pdf", ".png")
    }
    for name in names:
        assert (figures / f"{name}.svg").read_text().startswith("<?xml")
        assert (figures / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        pixels = matplotlib.image.imread(figures / f"{name}.png")
        assert pixels.min() < 0.5 < pixels.max()
    runs, _ = Loader(keep_steps=True).load([open_experiment(experiment.folder)])
    cells, _ = aggregate(runs)
    again = write_figures(Report(name="again", cells=cells, notes=[]), folder=tmp_path / "again", width=5.5)
    for file, inches in (("gap", 5.5), ("training-loss", 3.3)):
        drawn = write_figures(
            Report(name="sized", cells=cells, notes=[]), folder=tmp_path / f"{inches}", width=inches
        )
        [picture] = [path for path in drawn if path.name == f"{file}.png"]
        assert matplotlib.image.imread(picture).shape[1] == int(inches * 200)
    assert [file.read_bytes() for file in again] == [(figures / file.name).read_bytes() for file in again]
