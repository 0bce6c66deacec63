"""A report replaces the files that its command line names, and of others only earlier ones of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command_line import asyncpp, refusal, succeeded
from support.report_experiment import ExperimentFolder, settings


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    folder = ExperimentFolder(tmp_path / "e")
    folder.add(settings("1f1b", "muon"))
    folder.add(settings("2bw", "muon"))
    return folder.folder


@pytest.mark.slow
def test_figures_replace_figures_and_nothing_else(experiment: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures"
    (figures / "deep").mkdir(parents=True)
    own = figures / "gap.svg"
    own.write_text("<svg>drawn by hand</svg>")
    assert "gap.svg exists and was not written by asyncpp report" in refusal(
        "report", experiment, "--figures", figures
    )
    assert own.read_text() == "<svg>drawn by hand</svg>"
    assert sorted(path.name for path in figures.iterdir()) == ["deep", "gap.svg"]
    own.unlink()
    succeeded("report", experiment, "--figures", figures)
    assert len(list(figures.iterdir())) == 16
    assert asyncpp("report", experiment, "--figures", figures).code == 0  # its own are replaced
    assert len(list(figures.iterdir())) == 16
