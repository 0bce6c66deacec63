"""Every step and evaluation of every run, as a data frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import polars as pl

from asyncpp_cli.report.analysis.cells import CellResult
from asyncpp_cli.report.load.metrics_rows import STEP_SCHEMA
from asyncpp_cli.report.load.run import RunResult

_COLUMNS = ("run", "kind", *STEP_SCHEMA, "val_loss", "set")


def step_table(cells: Sequence[CellResult]) -> pl.DataFrame:
    """A table with columns `run`, `kind` (step, eval), those of `STEP_SCHEMA`, `val_loss`, and `set`: null
    for the headline, else a validation set."""
    runs = [run for cell in cells for run in cell.runs]
    names = pl.Enum(list(dict.fromkeys(run.id for run in runs)))
    kinds = pl.Enum(["step", "eval"])
    schema = dict(
        zip(_COLUMNS, (names, kinds, *STEP_SCHEMA.values(), pl.Float64(), pl.String()), strict=True)
    )
    return pl.concat([pl.DataFrame(schema=schema), *_parts(runs, schema)], rechunk=False)


def _parts(runs: Iterable[RunResult], schema: dict[str, pl.DataType]) -> Iterable[pl.DataFrame]:
    for run in runs:
        if run.steps is not None and len(run.steps):
            yield run.steps.select(
                pl.lit(run.id, dtype=schema["run"]).alias("run"),
                pl.lit("step", dtype=schema["kind"]).alias("kind"),
                *STEP_SCHEMA,
                pl.lit(None, dtype=pl.Float64()).alias("val_loss"),
                pl.lit(None, dtype=pl.String()).alias("set"),
            )
        evaluations = [
            {
                "run": run.id,
                "kind": "eval",
                "step": evaluation.step,
                "tokens": evaluation.tokens,
                "seconds": evaluation.seconds,
                "val_loss": loss,
                "set": of_set,
            }
            for evaluation in run.measurement.evaluations
            for of_set, loss in (
                (None, evaluation.val_loss),
                *((name, measured.val_loss) for name, measured in evaluation.sets.items()),
            )
        ]
        if evaluations:
            yield pl.DataFrame(evaluations, schema=schema)
