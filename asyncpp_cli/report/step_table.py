"""Every step and every evaluation of every run, as Parquet: what the page's curves are thinned from."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

import polars as pl

from asyncpp_cli.report.cells import Cell
from asyncpp_cli.report.loaded import Run
from asyncpp_cli.report.rows import STEP_SCHEMA

_LEVEL = 1
"""Of compression: a higher one takes several times as long for a few percent."""


def to_step_table(cells: Sequence[Cell]) -> bytes:
    """Columns `run`, `kind` (step, eval), those of `STEP_SCHEMA`, `val_loss`; null where a row has none."""
    runs = [run for cell in cells for run in cell.runs]
    names = pl.Enum(list(dict.fromkeys(run.id for run in runs)))
    kinds = pl.Enum(["step", "eval"])
    schema = {"run": names, "kind": kinds, **STEP_SCHEMA, "val_loss": pl.Float64()}
    table = pl.concat([pl.DataFrame(schema=schema), *_parts(runs, schema)], rechunk=False)
    stream = io.BytesIO()
    table.write_parquet(stream, compression="zstd", compression_level=_LEVEL)
    return stream.getvalue()


def _parts(runs: Iterable[Run], schema: dict[str, pl.DataType]) -> Iterable[pl.DataFrame]:
    for run in runs:
        if run.steps is not None and len(run.steps):
            yield run.steps.select(
                pl.lit(run.id, dtype=schema["run"]).alias("run"),
                pl.lit("step", dtype=schema["kind"]).alias("kind"),
                *STEP_SCHEMA,
                pl.lit(None, dtype=pl.Float64()).alias("val_loss"),
            )
        evaluations = [
            {
                "run": run.id,
                "kind": "eval",
                "step": one.step,
                "tokens": one.tokens,
                "seconds": one.seconds,
                "val_loss": one.val_loss,
            }
            for one in run.measurement.evaluations
        ]
        if evaluations:
            yield pl.DataFrame(evaluations, schema=schema)
