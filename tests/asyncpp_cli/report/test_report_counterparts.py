"""Which synchronous cell each cell is compared with, in the shipped experiments and beside them."""

from __future__ import annotations

from typing import Any

import pytest
from support.files import ROOT
from support.report_experiment import run

from asyncpp_cli.experiment.matrix import expand
from asyncpp_cli.experiment.shipped import template_names
from asyncpp_cli.experiment.template import load
from asyncpp_cli.report.analysis.aggregate import aggregate
from asyncpp_cli.report.analysis.cells import CellResult, arm_names
from asyncpp_cli.report.analysis.summary import summary_lines
from asyncpp_cli.report.load.measure import Measurement
from asyncpp_cli.report.load.run import RunResult
from asyncpp_cli.report.tables.document import table_of_cells
from asyncpp_cli.runs.settings import items


def swept(template: str) -> tuple[list[CellResult], list[str]]:
    """The cells of a shipped experiment, each with a loss of its own."""
    runs = [
        RunResult(
            id=resolved.cell.id,
            axes=resolved.cell.axes,
            config=dict(items(resolved.config)),
            state="completed",
            measurement=Measurement(val_loss=2.0 + place / 1000),
        )
        for place, resolved in enumerate(expand(load(template, ())))
    ]
    return aggregate(runs)


def of(cell: CellResult, key: str) -> Any:
    return cell.runs[0].value(key)


@pytest.mark.parametrize("template", [name for name in template_names("experiments") if name != "verdict"])
def test_every_delayed_cell_of_the_shipped_experiments_has_its_counterpart(template: str) -> None:
    """But of the verdict, which compares with one synchronous arm at its own rate."""
    cells, notes = swept(template)
    assert notes == []
    for cell in cells:
        if cell.synchronous:
            assert cell.baseline is None
            continue
        assert cell.baseline is not None
        assert (cell.baseline.schedule, cell.baseline.corrected) == ("1f1b", False)
        for key in ("optimizer", "optimizer.lr", "parallel.stages", "schedule.microbatches", "train.steps"):
            assert of(cell, key) == of(cell.baseline, key)
        assert (cell.uncorrected is None) == (not cell.corrected)
        if cell.uncorrected is not None:
            assert of(cell.uncorrected, "schedule") == of(cell, "schedule")
            assert cell.uncorrected.baseline is not None
            assert cell.uncorrected.baseline.runs == cell.baseline.runs
    assert len(set(arm_names(cells))) == len(cells)


def test_a_correction_is_compared_with_the_same_cell_without_it() -> None:
    cells, _ = swept(str(ROOT / "benchmarks/results/depth-sweep.yaml"))
    [discounted] = [cell for cell in cells if cell.correction and of(cell, "parallel.stages") == 8]
    assert discounted.uncorrected is not None
    assert (discounted.uncorrected.optimizer, of(discounted.uncorrected, "parallel.stages")) == ("adamw", 8)
    with_it, without, beside = (
        cell.val_loss.mean
        for cell in (discounted, discounted.uncorrected, discounted.baseline)
        if cell is not None and cell.val_loss is not None
    )
    assert discounted.recovered == pytest.approx((without - with_it) / (without - beside))
    said = " ".join(summary_lines(cells))
    assert f"with lr-discount by {with_it - beside:+.3f} (a wider gap)" in said
    assert "none" not in " ".join(arm_names(cells))


def test_one_synchronous_cell_stands_beside_every_delay() -> None:
    cells, _ = swept("delay-sweep")
    delayed = [cell for cell in cells if cell.optimizer == "adamw" and not cell.synchronous]
    assert [of(cell, "schedule.delay") for cell in delayed] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len({id(cell.baseline.runs) for cell in delayed if cell.baseline is not None}) == 1
    gaps = [cell.gap for cell in delayed]
    [said] = [line for line in summary_lines(cells) if line.startswith("Loss")]
    # As many gaps are a range, of each arm.
    assert "against 1f1b, over 8 values of schedule.delay, 2bw changes" in said
    low, high = gaps.index(min(gaps)), gaps.index(max(gaps))
    expected = f"{gaps[low]:+.3f} (schedule.delay {low + 1}) to {gaps[high]:+.3f} ({high + 1})"
    assert f"of adamw by {expected}; of muon by" in said
    table = table_of_cells(cells)
    column = [heading.key for heading in table.headings].index("schedule.delay")
    shown = {(row[0], row[column]) for row in table.rows}
    assert shown == {("1f1b", "-"), *(("2bw", str(delay)) for delay in range(1, 9))}


def test_a_setting_without_a_use_is_shown_where_it_alone_tells_cells_apart() -> None:
    runs = [
        run(name, axes={"schedule.delay": delay}, **{"schedule.delay": delay})
        for name in ("1f1b", "2bw")
        for delay in (1, 2)
    ]
    cells, _ = aggregate(runs)
    rows = table_of_cells(cells).rows
    assert len({tuple(row[:5]) for row in rows}) == 4


def test_reasons_against_a_comparison_are_named() -> None:
    _, notes = aggregate([run("1f1b"), run("paci", **{"train.clip": "stage"}), run("2bw")])
    assert notes == ["No synchronous counterpart for paci muon: the nearest differs in train.clip."]
    _, notes = aggregate([run("1f1b", "adamw"), run("2bw"), run("paci")])
    assert notes == [
        "No synchronous counterpart for 2bw muon and 1 more: the nearest differs in optimizer.name."
    ]
    _, notes = aggregate([run("2bw"), run("paci")])
    assert notes == []
