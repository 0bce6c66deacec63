"""A report replaces the files that its command line names, and of others only earlier ones of its own."""

from __future__ import annotations

from pathlib import Path

import polars as pl
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
def test_a_page_leaves_a_table_of_cells_beside_it_alone(experiment: Path, tmp_path: Path) -> None:
    cells, page, steps = (tmp_path / name for name in ("r.parquet", "r.html", "r.steps.parquet"))
    succeeded("report", experiment, "--format", "parquet", "--out", cells)
    before = cells.read_bytes()
    for _ in range(2):  # again: its own table of steps is replaced
        succeeded("report", experiment, "--format", "html", "--out", page)
        assert cells.read_bytes() == before
    succeeded("report", experiment, "--format", "steps", "--out", tmp_path / "own")
    assert (tmp_path / "own").read_bytes() == steps.read_bytes()
    assert pl.read_parquet(steps).filter(pl.col("kind").cast(pl.String) == "step").height == 8


@pytest.mark.parametrize("content", ["a note", "", "parquet"])
def test_a_page_is_refused_where_its_table_of_steps_would_replace_something(
    experiment: Path, tmp_path: Path, content: str
) -> None:
    page, beside = tmp_path / "r.html", tmp_path / "r.steps.parquet"
    beside.write_text(content)
    if content == "parquet":
        pl.DataFrame({"run": [1]}).write_parquet(beside)
    before = beside.read_bytes()
    assert f"{beside} exists and is not a table of steps" in refusal(
        "report", experiment, "--format", "html", "--out", page
    )
    assert (beside.read_bytes(), page.exists()) == (before, False)


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
