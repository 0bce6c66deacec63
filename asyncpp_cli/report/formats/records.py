"""A report as JSON, CSV and data frames: a record of plain numbers for each cell, and a row for each step."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from asyncpp_cli.base.console import printable
from asyncpp_cli.report.analysis.cells import CellResult
from asyncpp_cli.report.analysis.verdict_text import record_of
from asyncpp_cli.report.load.metrics_rows import STEP_SCHEMA
from asyncpp_cli.report.load.run import RunResult
from asyncpp_cli.report.tables.columns import records, value_columns
from asyncpp_cli.report.tables.document import Report
from asyncpp_cli.report.tables.pivot import pivot_rows

_FORMULA_STARTS = ("=", "+", "-", "@")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


def to_json(report: Report, _options: object = None) -> str:
    """A list of records; each holds the ids of its runs and their conditions, of a tuned arm `tuning`, and of
    an arm's longest cell `verdicts` and, of `transfers`, `planned`; `best` is true for the best cell, which
    also has the report's first line (`answer`)."""
    cells, tunings, transfers = report.cells, report.tunings, report.transfers
    listed = records(cells)
    for cell, record in zip(cells, listed, strict=True):
        record["best"] = report.answer is not None and cell is report.answer.best
        record["answer"] = report.answer.sentence if report.answer is not None and record["best"] else None
        record["verdicts"] = [record_of(verdict) for verdict in report.verdicts if verdict.delayed is cell]
        if transfers:
            record["planned"] = [each.record() for each in transfers if each.verdict.delayed is cell]
    arms = {
        run: record
        for tuning in tunings
        for each, record in zip(tuning.arms, tuning.records, strict=True)
        for run in each.leading.candidate.runs
    }
    for record in listed if tunings else []:
        record["tuning"] = next((arms[run] for run in record["runs"] if run in arms), None)
    return json.dumps(listed, indent=2, allow_nan=False) + "\n"


def flat_records(cells: Sequence[CellResult]) -> list[dict[str, Any]]:
    """The records with each condition as a field of its own."""
    return [fields | fields.pop("conditions") for fields in records(cells)]


def to_csv(report: Report, _options: object = None) -> str:
    """A line for each cell, conditions last, or the pivoted table; None is an empty field, a list is JSON."""
    if report.cols:
        values = value_columns(report.values, report.cells)
        return csv_text(pivot_rows(report.cells, rows=report.rows, cols=report.cols, values=values))
    rows = flat_records(report.cells)
    names = list(rows[0]) if rows else ["schedule"]
    return csv_text([names, *([_list_as_json(row[name]) for name in names] for row in rows)])


def csv_text(rows: Sequence[Sequence[Any]]) -> str:
    """Rows as CSV, the header first; None is an empty field."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(
        [_not_a_formula(value) for value in row] for row in rows
    )
    return stream.getvalue()


def frame_of(rows: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    """Rows of the same fields as a data frame; a column of mixed types is text."""
    names = list(rows[0]) if rows else []
    return pl.DataFrame({name: _one_type([row[name] for row in rows]) for name in names})


def _list_as_json(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | tuple | dict) else value


def _not_a_formula(value: Any) -> Any:
    """The value, with an apostrophe before text that a spreadsheet would run as a formula.

    Text that is a number (`-0.5`) stays as it is. OWASP, "CSV Injection".
    """
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(_FORMULA_STARTS) and _NUMBER.fullmatch(text) is None else text


def _one_type(values: list[Any]) -> list[Any]:
    types = {type(value) for value in values if value is not None}
    if types == {int, float}:
        return [None if value is None else float(value) for value in values]
    if len(types) > 1:
        return [None if value is None else str(_list_as_json(value)) for value in values]
    return values


def step_table(cells: Sequence[CellResult]) -> pl.DataFrame:
    """A table with columns `run`, `kind` (step, eval), those of `STEP_SCHEMA`, `val_loss`, and `set`: null
    for the headline, else a validation set."""
    runs = [run for cell in cells for run in cell.runs]
    schema: dict[str, pl.DataType] = {
        "run": pl.Enum(list(dict.fromkeys(run.id for run in runs))),
        "kind": pl.Enum(["step", "eval"]),
        **STEP_SCHEMA,
        "val_loss": pl.Float64(),
        "set": pl.String(),
    }
    return pl.concat([pl.DataFrame(schema=schema), *_parts(runs, schema)], how="diagonal", rechunk=False)


def _parts(runs: Iterable[RunResult], schema: dict[str, pl.DataType]) -> Iterable[pl.DataFrame]:
    for run in runs:
        if run.steps is not None and len(run.steps):
            yield run.steps.with_columns(
                pl.lit(run.id, dtype=schema["run"]).alias("run"),
                pl.lit("step", dtype=schema["kind"]).alias("kind"),
            )
        evaluations = [
            {
                "run": run.id,
                "kind": "eval",
                **{name: getattr(evaluation, name) for name in ("step", "tokens", "seconds")},
                "val_loss": loss,
                "set": of_set,
            }
            for evaluation in run.evaluations
            for of_set, loss in (
                (None, evaluation.val_loss),
                *((name, measured.val_loss) for name, measured in (evaluation.sets or {}).items()),
            )
        ]
        if evaluations:
            yield pl.DataFrame(evaluations, schema=schema)
