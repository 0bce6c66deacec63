"""Every step and every evaluation of every run, as Parquet: what the page's curves are thinned from."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import polars as pl

from asyncpp_cli.report.cells import Cell
from asyncpp_cli.report.loaded import Run
from asyncpp_cli.report.rows import STEP_SCHEMA

_LEVEL = 1
"""Of compression: a higher one takes several times as long for a few percent."""

_COLUMNS = ("run", "kind", *STEP_SCHEMA, "val_loss")


def to_step_table(cells: Sequence[Cell]) -> bytes:
    """Columns `run`, `kind` (step, eval), those of `STEP_SCHEMA`, `val_loss`; null where a row has none."""
    runs = [run for cell in cells for run in cell.runs]
    names = pl.Enum(list(dict.fromkeys(run.id for run in runs)))
    kinds = pl.Enum(["step", "eval"])
    schema = dict(zip(_COLUMNS, (names, kinds, *STEP_SCHEMA.values(), pl.Float64()), strict=True))
    table = pl.concat([pl.DataFrame(schema=schema), *_parts(runs, schema)], rechunk=False)
    stream = io.BytesIO()
    table.write_parquet(stream, compression="zstd", compression_level=_LEVEL)
    return stream.getvalue()


def is_step_table(file: Path) -> bool:
    """Whether a file has the columns of such a table, so that a newer one may take its place."""
    try:
        return tuple(pl.read_parquet_schema(file)) == _COLUMNS
    except (OSError, pl.exceptions.PolarsError):
        return False


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
