"""`asyncpp report` through the real command line: files that it writes, and those that it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.image
import pytest
from support.command_line import refusal, succeeded
from support.report_experiment import ExperimentFolder, metrics, report_of, settings

from asyncpp_cli.report.formats.figures import write_figures

HOSTILE = "$\\frac{1}{2}$ a_b^c <x>"


@pytest.mark.slow
@pytest.mark.parametrize("output_format", ["table", "markdown", "csv", "json"])
def test_out_holds_what_standard_output_would(
    quickstart: ExperimentFolder, tmp_path: Path, output_format: str
) -> None:
    file = tmp_path / "report.txt"
    file.write_text("an older report")
    words = ("report", quickstart.folder, "--format", output_format)
    printed, written = succeeded(*words), succeeded(*words, "--out", file)
    assert (file.read_text(), written.output) == (printed.output, "")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.txt"]


@pytest.mark.slow
def test_figures_are_pictures_of_each_format_and_replace_figures_alone(tmp_path: Path) -> None:
    """Of names that look like formulas, too; and the same numbers make the same files."""
    experiment = ExperimentFolder(tmp_path / "experiment")
    for schedule in ("1f1b", "2bw"):
        for path in ("plain", HOSTILE):
            named = settings(schedule, "muon", **{"data.path": path})
            experiment.add(named, axes={"data.path": path}, rows=metrics())
    figures = tmp_path / "figures"
    (figures / "deep").mkdir(parents=True)
    own = figures / "gap.svg"
    own.write_text("<svg>drawn by hand</svg>")
    words = ("report", experiment.folder, "--format", "json", "--figures", figures)
    assert "gap.svg exists and was not written by asyncpp report" in refusal(*words)
    assert own.read_text() == "<svg>drawn by hand</svg>"
    assert sorted(path.name for path in figures.iterdir()) == ["deep", "gap.svg"]
    own.unlink()
    (figures / "deep").rmdir()
    for _ in range(2):  # its own are replaced
        assert len(json.loads(succeeded(*words).output)) == 4
    names = {"training-loss", "validation-loss", "gap", "throughput", "busy"}
    assert {(file.stem, file.suffix) for file in figures.iterdir()} == {
        (name, suffix) for name in names for suffix in (".svg", ".pdf", ".png")
    }
    for name in names:
        assert (figures / f"{name}.svg").read_text().startswith("<?xml")
        assert (figures / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        pixels = matplotlib.image.imread(figures / f"{name}.png")
        assert pixels.min() < 0.5 < pixels.max()
    report = report_of(experiment.folder, keep_steps=True)
    for file, inches in (("gap", 5.5), ("training-loss", 3.3)):
        folder = tmp_path / f"{inches}"
        again = write_figures(report, folder=folder, width=inches)
        assert matplotlib.image.imread(folder / f"{file}.png").shape[1] == int(inches * 200)
        if inches == 5.5:
            same = [(figures / each.name).read_bytes() for each in again]
            assert [each.read_bytes() for each in again] == same
