"""`--best-over`: what each arm keeps of what was tried, and what is said about it."""

from __future__ import annotations

from typing import Any

import pytest
from support.report_experiment import settings

from asyncpp_cli.report.analysis.aggregate import aggregate_best
from asyncpp_cli.report.analysis.cells import CellResult
from asyncpp_cli.report.load.measure import Measurement
from asyncpp_cli.report.load.run import RunResult

LR = "optimizer.lr"


def tried(
    schedule: str, losses: dict[float, float | None], *, seed: int = 0, **further: Any
) -> list[RunResult]:
    """A run for each rate; one without a loss has not completed."""
    return [
        RunResult(
            id=f"{schedule}-{rate}-{seed}",
            axes={LR: rate},
            config=settings(schedule, "muon", seed=seed, **{LR: rate}, **further),
            state="completed" if loss is not None else "failed",
            measurement=Measurement(val_loss=loss),
        )
        for rate, loss in losses.items()
    ]


def best(*runs: RunResult) -> tuple[list[CellResult], str]:
    cells, _, choices = aggregate_best(runs, best_over=[LR])
    return cells, " ".join(choices)


def test_each_arm_keeps_its_own_best_and_is_compared_with_the_other_arms_best() -> None:
    cells, said = best(
        *tried("1f1b", {1e-3: 2.3, 2e-3: 2.0, 4e-3: 2.2}), *tried("2bw", {1e-3: 2.1, 2e-3: 2.4, 4e-3: 2.9})
    )
    assert [(cell.schedule, cell.axes[LR]) for cell in cells] == [("1f1b", 2e-3), ("2bw", 1e-3)]
    assert cells[1].gap == pytest.approx(0.1)
    assert "Best optimizer.lr of 0.001, 0.002, 0.004" in said
    assert "1f1b muon 0.002; 2bw muon 0.001 (on the edge)." in said
    assert "a better optimizer.lr may lie beyond" in said


def test_the_mean_over_seeds_decides() -> None:
    runs = [*tried("1f1b", {1e-3: 2.0, 2e-3: 1.9}), *tried("1f1b", {1e-3: 2.0, 2e-3: 2.5}, seed=1)]
    [cell], _ = best(*runs)
    assert (cell.axes[LR], cell.n) == (1e-3, 2)


def test_diverged_and_failed_values_do_not_win_and_are_counted() -> None:
    [cell], said = best(*tried("1f1b", {1e-3: 2.2, 2e-3: float("nan"), 4e-3: None, 5e-4: 2.1}))
    assert cell.axes[LR] == 5e-4
    assert "of 0.001, 0.0005 (2 more without a result)" in said


def test_an_arm_without_a_result_keeps_all_its_cells() -> None:
    cells, said = best(
        *tried("1f1b", {1e-3: 2.0, 2e-3: 2.1, 4e-3: 2.2}), *tried("2bw", {1e-3: None, 2e-3: None})
    )
    assert [(cell.schedule, cell.state) for cell in cells] == [
        ("1f1b", "completed"),
        ("2bw", "failed"),
        ("2bw", "failed"),
    ]
    assert "2bw" not in said


def test_one_value_alone_was_not_chosen() -> None:
    _, said = best(*tried("1f1b", {1e-3: 2.0}))
    assert "had no choice" in said
    assert "edge" not in said
    _, said = best(*tried("1f1b", {1e-3: 2.0, 2e-3: 1.9, 4e-3: 2.1}))
    assert "had no choice" not in said
    assert "edge" not in said


def test_unequal_numbers_of_runs_are_named() -> None:
    runs = [
        *tried("1f1b", {1e-3: 2.0, 2e-3: 1.9}),
        *tried("2bw", {1e-3: 2.0}),
        *tried("2bw", {1e-3: 2.0}, seed=1),
    ]
    _, said = best(*runs)
    assert "n = 1 to 2" in said


def test_unfinished_arms_are_no_baselines_of_each_other_and_not_counted_among_the_chosen() -> None:
    cells, said = best(
        *tried("1f1b", {1e-3: 2.3, 2e-3: 2.0}),
        *tried("gpipe", {1e-3: None, 2e-3: None}, **{"train.steps": 9}),
    )
    assert [cell.baseline for cell in cells] == [None, None, None]
    assert "different numbers of runs" not in said
