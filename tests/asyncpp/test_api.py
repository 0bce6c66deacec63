"""The Python API: the same experiments and numbers as the command line's."""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.command_line import asyncpp as command
from support.files import ROOT
from support.report_experiment import quickstart_folder

import asyncpp

NOTEBOOK = ROOT / "docs" / "notebooks" / "quickstart.ipynb"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment as a finished launch leaves it."""
    return quickstart_folder(tmp_path_factory.mktemp("api")).folder


def test_import_loads_no_torch_and_no_data_frames() -> None:
    heavy = ("torch", "polars", "plotly", "numpy", "omegaconf", "rich")
    code = f"import asyncpp, sys; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_it_sweeps_the_cells_of_the_command_line(tmp_path: Path) -> None:
    changes = ("train.steps=3", "matrix.seed=[0,1]")
    here = asyncpp.sweep("quickstart", *changes, out=tmp_path / "api")
    assert command("sweep", "quickstart", *changes, "--out", tmp_path / "cli").code == 0
    there = asyncpp.open(tmp_path / "cli")
    assert here.ids == there.ids
    assert len(here.ids) == 12
    assert here.cells.equals(there.cells)
    assert here.cells["id"].to_list() == here.ids
    assert set(here.cells["schedule"]) == {"1f1b", "2bw"}
    for name in here.ids:
        config = Path("runs") / name / "config.yaml"
        assert (here.folder / config).read_bytes() == (there.folder / config).read_bytes()
    more = asyncpp.sweep("quickstart", "train.steps=3", "matrix.seed=[0,1,2]", out=here.folder)
    assert set(here.ids) == set(more.ids)
    assert len(more.ids) == 18


def test_a_mistake_is_an_error_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(asyncpp.UserError, match=r"did you mean train\.steps"):
        asyncpp.sweep("quickstart", "trian.steps=3", out=tmp_path / "e")
    assert not (tmp_path / "e").exists()
    with pytest.raises(asyncpp.UserError, match="is not an experiment"):
        asyncpp.open(tmp_path)
    experiment = asyncpp.sweep("quickstart", out=tmp_path / "e")
    with pytest.raises(asyncpp.UserError, match="are for clusters"):
        experiment.launch(wait=True)
    (tmp_path / "e" / "runs" / experiment.ids[0] / "config.yaml").write_text("train: [")
    with pytest.raises(asyncpp.UserError, match=r"config\.yaml is not YAML"):
        experiment.launch(dry_run=True)
    with pytest.raises(asyncpp.UserError, match=r"config\.yaml is not YAML"):
        experiment.extend(steps=1000, out=tmp_path / "longer")


def test_results_are_those_of_the_report_and_steps_those_of_the_runs(folder: Path) -> None:
    experiment = asyncpp.open(folder)
    results = experiment.results()
    read = pl.read_csv(command("report", folder, "--format", "csv").output.encode())
    assert read["val_loss"].to_list() == results["val_loss"].to_list()
    assert set(read.columns) == set(results.columns)
    [rows] = {path.read_text().count('"kind": "step"') for path in folder.glob("runs/*/metrics.jsonl")}
    steps = experiment.steps().filter(pl.col("kind").cast(pl.String) == "step")
    assert steps.height == len(experiment.ids) * rows


def test_status_is_that_of_the_command(folder: Path) -> None:
    printed = json.loads(command("status", folder, "--json").output)
    frame = asyncpp.open(folder).status()
    assert frame["id"].to_list() == [record["id"] for record in printed]
    for name in ("state", "step", "train_loss", "reason", "saved_step"):
        assert frame[name].to_list() == [record[name] for record in printed], name
    assert frame["seed"].to_list() == [record["axes"]["seed"] for record in printed]


def test_wait_returns_at_once_when_nothing_runs(folder: Path, tmp_path: Path) -> None:
    states = set(asyncpp.open(folder).status()["state"])
    assert asyncpp.open(folder).wait() == (states == {"completed"})
    assert not asyncpp.sweep("quickstart", out=tmp_path / "e").wait()


def test_figures_have_the_numbers_of_the_results(folder: Path) -> None:
    experiment = asyncpp.open(folder)
    figures = experiment.figures()
    results = experiment.results()
    assert list(figures) == ["training-loss", "validation-loss", "gap", "throughput", "busy"]
    gaps = figures["gap"].data[0].x
    assert gaps == pytest.approx(results["gap"].drop_nulls().to_list(), abs=1e-6)
    speeds = figures["throughput"].data[0].x
    assert speeds == pytest.approx(results["tokens_per_second"].to_list(), rel=1e-6)
    assert len(figures["training-loss"].data) >= len(results)


def test_a_notebook_shows_the_table_with_names_escaped(folder: Path) -> None:
    experiment = asyncpp.open(folder)
    shown = experiment._repr_html_()
    assert shown.count("<tr") == 1 + len(experiment.results())
    assert "<script" not in shown
    assert "2bw" in shown


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "train.steps=60" in sources[0]
    sources[0] = sources[0].replace("train.steps=60", "train.steps=2")
    names: dict[str, Any] = {}
    shown = [value_of(source, names) for source in sources]
    assert shown[1] is True
    assert shown[2]["schedule"].to_list() == ["1f1b", "2bw", "2bw"]
    assert sum(trace.showlegend for trace in shown[3].data) == 3
    assert set(shown[4]["step"]) == {2}


def value_of(source: str, names: dict[str, Any]) -> Any:
    """Run a cell; returns the value of its last line, which a notebook shows."""
    *before, last = ast.parse(source).body
    exec(compile(ast.Module(before, []), "<cell>", "exec"), names)
    if not isinstance(last, ast.Expr):
        exec(compile(ast.Module([last], []), "<cell>", "exec"), names)
        return None
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
