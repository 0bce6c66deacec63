"""`--figures`: pictures for papers."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.image
import pytest
from support.command_line import succeeded
from support.report_experiment import ExperimentFolder, metrics, settings

from asyncpp_cli.report.analysis.aggregate import aggregate
from asyncpp_cli.report.formats.figures import write_figures
from asyncpp_cli.report.load.experiments import load
from asyncpp_cli.report.tables.document import Report
from asyncpp_cli.runs.experiment_folder import open_experiment

HOSTILE = "$\\frac{1}{2}$ a_b^c <x>"


@pytest.mark.slow
def test_figures_are_pictures_of_each_format(tmp_path: Path) -> None:
    """Of names that look like formulas, too; and the same numbers make the same files."""
    experiment = ExperimentFolder(tmp_path / "experiment")
    for schedule in ("1f1b", "2bw"):
        for path in ("plain", HOSTILE):
            named = settings(schedule, "muon", **{"data.path": path})
            experiment.add(named, axes={"data.path": path}, rows=metrics())
    figures = tmp_path / "figures"
    done = succeeded("report", experiment.folder, "--format", "json", "--figures", figures)
    assert len(json.loads(done.output)) == 4
    names = {"training-loss", "validation-loss", "gap", "throughput", "busy"}
    assert {(file.stem, file.suffix) for file in figures.iterdir()} == {
        (name, suffix) for name in names for suffix in (".svg", ".pdf", ".png")
    }
    for name in names:
        assert (figures / f"{name}.svg").read_text().startswith("<?xml")
        assert (figures / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        pixels = matplotlib.image.imread(figures / f"{name}.png")
        assert pixels.min() < 0.5 < pixels.max()
    runs, _ = load([open_experiment(experiment.folder)], keep_steps=True)
    cells, _ = aggregate(runs)
    again = write_figures(Report(name="again", cells=cells, notes=[]), folder=tmp_path / "again", width=5.5)
    for file, inches in (("gap", 5.5), ("training-loss", 3.3)):
        drawn = write_figures(
            Report(name="sized", cells=cells, notes=[]), folder=tmp_path / f"{inches}", width=inches
        )
        [picture] = [path for path in drawn if path.name == f"{file}.png"]
        assert matplotlib.image.imread(picture).shape[1] == int(inches * 200)
    assert [file.read_bytes() for file in again] == [(figures / file.name).read_bytes() for file in again]
