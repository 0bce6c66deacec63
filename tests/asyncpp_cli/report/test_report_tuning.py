"""The report of a tuned experiment: each arm at its best, the price, and the picture's data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.command_line import asyncpp, succeeded
from support.report_experiment import record, tuned_experiment

import asyncpp as asyncpp_api
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.status import Cause, State, Status


@pytest.fixture
def tuned(tmp_path: Path) -> Experiment:
    return tuned_experiment(tmp_path / "e")


def test_each_arm_at_its_best(tuned: Experiment) -> None:
    ended = succeeded("report", tuned.folder, "--format", "json")
    first, second = json.loads(ended.output)
    best = [(cell["schedule"], cell["optimizer.lr"]) for cell in (first, second)]
    assert best == [("1f1b", 1e-3), ("2bw", 1e-1)]
    assert second["gap"] == pytest.approx((2.1 - 0.2) - (2.0 - 0.2)), "against the other arm's best"
    assert (first["tuning"]["steps"], first["tuning"]["grid_steps"]) == (4 * 2 + 2 * 2 + 12, 4 * 16)
    assert (first["tuning"]["on_edge"], second["tuning"]["on_edge"]) == ([], ["optimizer.lr"])
    assert [each["step"] for each in first["tuning"]["candidates"]] == [2, 16, 4, 2]


def test_price_and_edge_are_in_the_summary(tuned: Experiment) -> None:
    text = " ".join(asyncpp("report", tuned.folder).output.split())
    assert "Tuned over optimizer.lr=1e-4:1e-1:log, 4 points in each arm" in text
    assert "Tuning took 48 steps; the grid takes 128, 2.7 times fewer." in text
    edge = "On the edge of the values tried, so a better one may lie beyond: optimizer.lr of schedule=2bw."
    assert edge in text
    # More seeds or lengths of the whole experiment would also train what was left behind.
    assert "a small gap may be chance. A short run" in text
    assert "Train each arm with its own optimizer.lr, which overrides of a template set" in text
    assert "asyncpp sweep" not in text


def test_a_failed_run_is_named(tuned: Experiment) -> None:
    run = tuned.run(tuned.cells[3].id)
    run.metrics_file.unlink()
    status = Status(state=State.FAILED, cause=Cause.ERROR, reason="it diverged", attempt=1, steps=16)
    run.write_status(status)
    text = " ".join(asyncpp("report", tuned.folder).output.split())
    assert f"{run.id} failed and counts as last: it diverged." in text


def test_an_incomplete_tuning_shows_what_leads(tuned: Experiment) -> None:
    for cell in tuned.cells:
        if cell.axes["schedule"] == "2bw":
            tuned.run(cell.id).status_file.unlink()
            tuned.run(cell.id).metrics_file.unlink()
    record(tuned.run(tuned.cells[5].id), {2: 2.5})
    ended = succeeded("report", tuned.folder, "--format", "json")
    second = json.loads(ended.output)[1]
    assert (second["optimizer.lr"], second["tuning"]["complete"]) == (1e-3, False)
    assert "0.001 (not complete) of schedule=2bw" in " ".join(asyncpp("report", tuned.folder).output.split())


@pytest.mark.slow
def test_figures_have_a_line_for_each_arm_and_rung(tuned: Experiment, tmp_path: Path) -> None:
    figure = asyncpp_api.open(tuned.folder).figures()["tuning-optimizer.lr"]
    assert figure.layout.xaxis.type == "log"
    first = figure.data[:3]
    assert [list(line.x) for line in first] == [[1e-4, 1e-3, 1e-2, 1e-1], [1e-3, 1e-2], [1e-3]]
    assert [list(line.y) for line in first] == [[3.0, 2.0, 2.5, 4.0], [1.9, 2.4], [1.8]]
    assert [list(line.marker.size) for line in first] == [[6, 6, 6, 6], [6, 6], [13]], "the best is marked"
    assert [line.showlegend for line in figure.data] == [False, False, True] * 2
    succeeded("report", tuned.folder, "--figures", tmp_path / "figures")
    for suffix in ("svg", "pdf", "png"):
        assert (tmp_path / "figures" / f"tuning-optimizer.lr.{suffix}").is_file()


def test_the_page_has_a_chart(tuned: Experiment) -> None:
    file = tuned.folder / "page.html"
    succeeded("report", tuned.folder, "--format", "html", "--out", file)
    page = file.read_text()
    assert 'id="tuning-optimizer.lr-chart"' in page
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    chart = json.loads(found[1])["charts"]["tuning-optimizer.lr"]
    assert chart["layout"]["xaxis"]["type"] == "log"
    figure = asyncpp_api.open(tuned.folder).figures()["tuning-optimizer.lr"]
    for line, same in zip(chart["data"], figure.data, strict=True):
        assert (line["x"], line["y"]) == (list(same.x), list(same.y))
