"""A run's metrics as the report reads them: the many `step` rows in columns, the few others as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from asyncpp_cli import runs

Row = Mapping[str, Any]

STEP_SCHEMA = {
    "step": pl.Int64(),
    "tokens": pl.Int64(),
    "train_loss": pl.Float64(),
    "lr": pl.Float64(),
    "grad_norm": pl.Float64(),
    "skipped": pl.Boolean(),
    "seconds": pl.Float64(),
}
"""The columns of `Metrics.steps`: the fields of a `step` row."""

REQUIRED = ("step", "tokens", "skipped", "seconds")
"""Columns in which every `step` row has a value. A `train_loss` that is not finite is NaN."""

_STEP_BEGINS = b'{"kind": "step",'
# Begins with a plain character, which `re` looks for fast: the end of the line before.
_NO_STEP_ROW = re.compile(rb"\n(?!" + re.escape(_STEP_BEGINS) + rb")(?!\Z)[^\n]*")
_NOT_FINITE = re.compile(rb"(?<=: )(?:NaN|-?Infinity)(?=[,}])")
_NO_FINITE_LOSS = re.compile(rb'"train_loss": (?:null|NaN|-?Infinity)')


def _no_steps() -> pl.DataFrame:
    return pl.DataFrame(schema=STEP_SCHEMA)


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The rows of one run that hold: those of steps that a later attempt did again are left out."""

    steps: pl.DataFrame = field(default_factory=_no_steps)
    others: Sequence[Row] = ()
    torn: int = 0
    """Lines that are no JSON object; left out, too."""


def read_metrics(run: runs.Run) -> Metrics:
    """The metrics of a run; none at all where the file is missing.

    Raises:
        KeyError, TypeError or ValueError: a `step` row lacks a field, or has a value of another type in it.
    """
    try:
        text = run.metrics_file.read_bytes()
    except FileNotFoundError:
        return Metrics()
    try:
        return _read_in_columns(text) if text else Metrics()
    except (pl.exceptions.PolarsError, ValueError):
        # A torn line, or rows of another form: line by line it shows which, and takes ten times as long.
        rows, torn = run.metrics_and_torn_lines()
        return of_rows(rows, torn=torn)


def of_rows(rows: Iterable[Row], *, torn: int = 0) -> Metrics:
    """Rows that hold, as `Metrics`.

    Raises:
        KeyError, TypeError or ValueError: as `read_metrics`.
    """
    steps: list[Row] = []
    others: list[Row] = []
    for row in rows:
        (steps if row["kind"] == "step" else others).append(row)
    columns = {name: [_typed(row[name], kind) for row in steps] for name, kind in STEP_SCHEMA.items()}
    return Metrics(steps=_whole(pl.DataFrame(columns, schema=STEP_SCHEMA)), others=others, torn=torn)


def _typed(value: Any, kind: pl.DataType) -> Any:
    if value is None:
        return None
    if isinstance(value, bool):
        is_accepted = kind == pl.Boolean()
    else:
        is_accepted = isinstance(value, int | float if kind == pl.Float64() else int) and kind != pl.Boolean()
    if not is_accepted:
        raise TypeError(f"{value!r} where {kind} is meant")
    return float(value) if kind == pl.Float64() else value


def _whole(steps: pl.DataFrame) -> pl.DataFrame:
    if any(steps[name].null_count() for name in REQUIRED):
        raise ValueError("a step row lacks a field")
    return steps.with_columns(pl.col("train_loss").fill_null(float("nan")))


def _read_in_columns(text: bytes) -> Metrics:
    """The fast way, for files in which every line is whole.

    Raises:
        polars.exceptions.PolarsError or ValueError: there is something in the file that it does not take.
    """
    if not text.endswith(b"\n"):
        # Being written at this moment, or torn.
        raise ValueError("the last line has no end")
    spans = _other_lines(text)
    others = [json.loads(text[begin:end]) for begin, end in spans]
    if any(not isinstance(row, dict) or row.get("kind", "step") == "step" for row in others):
        raise ValueError("a line that is no row, or a step row of another writer")
    if _STEP_BEGINS not in text:
        return Metrics(others=_that_hold(others))
    table = _parsed(text)
    lines = _line_numbers(text, spans)
    is_step = np.ones(len(table), dtype=bool)
    is_step[lines] = False
    starts = [place for place, row in enumerate(others) if row["kind"] == "start"]
    for start in starts[1:]:
        done = others[start].get("updates", others[start]["step"])
        before = table["step"][: lines[start]].fill_null(0).to_numpy()
        is_step[: lines[start]] &= before <= done
    steps = table.filter(pl.Series(is_step))
    nulls = steps["train_loss"].null_count()
    if nulls and nulls > len(_NO_FINITE_LOSS.findall(text)):
        raise ValueError("a step row without a loss")
    return Metrics(steps=_whole(steps), others=_that_hold(others))


def _parsed(text: bytes) -> pl.DataFrame:
    """A row for every line, of the fields that a `step` row has."""
    try:
        return pl.read_ndjson(text, schema=STEP_SCHEMA)
    except pl.exceptions.PolarsError:
        if b"NaN" not in text and b"Infinity" not in text:
            raise
        # Python writes them, and JSON does not know them.
        return pl.read_ndjson(_NOT_FINITE.sub(b"null", text), schema=STEP_SCHEMA)


def _other_lines(text: bytes) -> list[tuple[int, int]]:
    """Where the lines begin and end that are no `step` rows."""
    first = [] if text.startswith(_STEP_BEGINS) else [(0, text.index(b"\n"))]
    return [*first, *((match.start() + 1, match.end()) for match in _NO_STEP_ROW.finditer(text))]


def _line_numbers(text: bytes, spans: Sequence[tuple[int, int]]) -> list[int]:
    """The number of the line that begins at each span, from 0."""
    numbers, number, place = [], 0, 0
    for begin, _ in spans:
        number += text.count(b"\n", place, begin)
        numbers.append(number)
        place = begin
    return numbers


def _that_hold(rows: Iterable[Row]) -> list[Row]:
    """As `runs.Run.metrics` has it, of rows without steps."""
    held: list[Row] = []
    for row in rows:
        if row["kind"] == "start":
            held = [earlier for earlier in held if runs.holds(earlier, before=row)]
        held.append(row)
    return held
