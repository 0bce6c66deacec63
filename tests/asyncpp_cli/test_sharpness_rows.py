"""benchmarks/sharpness_rows.py: the rows of runs, and the medians of each arm."""

from __future__ import annotations

from dataclasses import replace

from support.metrics_rows import diagnostics_row
from support.report_runs import run

from asyncpp_cli.report.load.diagnostics import by_step
from asyncpp_cli.report.load.measure import Evaluation
from benchmarks.sharpness_rows import arm_table, rows_of, share_table


def test_an_arm_has_the_medians_of_the_second_half_of_its_seeds() -> None:
    runs = []
    for seed, values in ((0, (90.0, 10.0, 20.0)), (1, (90.0, 30.0, 40.0))):
        one = run("1f1b", "adamw", seed=seed)
        evaluations = tuple(
            Evaluation(step=step, tokens=step, seconds=1.0, val_loss=2.0 + seed) for step in (10, 20, 30)
        )
        rows = tuple(
            {**diagnostics_row(step, value), "lr": 1e-3, "residual": 0.0}
            for step, value in zip((10, 20, 30), values, strict=True)
        )
        measurement = replace(one.measurement, diagnostics=rows, evaluations=evaluations)
        runs.append(replace(one, measurement=measurement))
    rows = rows_of(runs)
    assert len(rows) == 6
    [line] = arm_table(rows)[2:]
    # Limit, sharpness, its share of the limit.
    assert "| 2 | 30 | 38 | 25 | 0.658 |" in line
    assert line.endswith("| 2.500 |")
    assert arm_table([])[2:] == []
    head, _, shares = share_table(rows)
    assert head.endswith("| limit | 10 | 20 | 30 |")
    assert shares.endswith("| 38 | 2.37 | 0.53 | 0.79 |")


def test_the_values_of_several_runs_are_gathered_by_step() -> None:
    curves = [([10, 20], [1.0, None]), ([5, 10], [3.0, 2.0])]
    assert by_step(curves) == {5: [3.0], 10: [1.0, 2.0]}
    assert by_step([]) == {}
