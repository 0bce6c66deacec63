"""Reads a run's metrics: the many `step` rows as a data frame, the few others as they are."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from asyncpp_cli.runs.run_folder import Run, without_repeated
from stages.config.records import CHECKSUM

MetricsRow = Mapping[str, Any]

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
"""Fields that every `step` row has. A `train_loss` that is not finite becomes NaN."""

_STEP_BEGINS = b'{"kind": "step",'
# Begins with a literal, the end of the line before, which `re` finds fast.
_NO_STEP_ROW = re.compile(rb"\n(?!" + re.escape(_STEP_BEGINS) + rb")(?!\Z)[^\n]*")
_NOT_FINITE = re.compile(rb"(?<=: )(?:NaN|-?Infinity)(?=[,}])")
_NO_FINITE_LOSS = re.compile(rb'"train_loss": (?:null|NaN|-?Infinity)')


def _no_steps() -> pl.DataFrame:
    return pl.DataFrame(schema=STEP_SCHEMA)


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The valid rows of a run: rows of steps that a later attempt repeated are left out."""

    steps: pl.DataFrame = field(default_factory=_no_steps)
    others: Sequence[MetricsRow] = ()
    torn: int = 0
    """Number of lines that are not JSON objects, also left out."""


_FEW_BYTES = 10_000


def read_metrics(run: Run) -> Metrics:
    """The metrics of a run; empty if the file is missing.

    Raises:
        KeyError, TypeError or ValueError: a `step` row lacks a field, or has a value of another type in it.
    """
    try:
        text = run.metrics_file.read_bytes()
    except FileNotFoundError:
        return Metrics()
    # Line by line a large file takes ten times as long, and a small one half as long.
    with contextlib.suppress(pl.exceptions.PolarsError, ValueError, RecursionError):
        if len(text) > _FEW_BYTES:
            return _read_in_columns(text)
    # A truncated line, or rows of another form, too.
    rows, torn = run.metrics_and_torn_lines()
    return from_rows(rows, torn=torn)


def from_rows(rows: Iterable[MetricsRow], *, torn: int = 0) -> Metrics:
    """Valid rows as `Metrics`.

    Raises:
        KeyError, TypeError or ValueError: as `read_metrics`.
    """
    steps: list[MetricsRow] = []
    others: list[MetricsRow] = []
    for row in rows:
        (steps if row["kind"] == "step" else others).append(row)
    columns = {name: [_typed(row[name], kind) for row in steps] for name, kind in STEP_SCHEMA.items()}
    return Metrics(steps=_complete(pl.DataFrame(columns, schema=STEP_SCHEMA)), others=others, torn=torn)


def _typed(value: Any, kind: pl.DataType) -> Any:
    if value is None:
        return None
    if isinstance(value, bool):
        is_accepted = kind == pl.Boolean()
    else:
        is_accepted = isinstance(value, int | float if kind == pl.Float64() else int) and kind != pl.Boolean()
    if not is_accepted:
        raise TypeError(f"{value!r} is not {kind}")
    return float(value) if kind == pl.Float64() else value


def _complete(steps: pl.DataFrame) -> pl.DataFrame:
    if any(steps[name].null_count() for name in REQUIRED):
        raise ValueError("a step row lacks a field")
    return steps.with_columns(pl.col("train_loss").fill_null(float("nan")))


def _read_in_columns(text: bytes) -> Metrics:
    """Read a file fast, if every line is complete.

    Raises:
        polars.exceptions.PolarsError or ValueError: a line is not, or has another form.
    """
    if not text.endswith(b"\n"):
        # Still being written, or truncated.
        raise ValueError("the last line has no end")
    spans = _other_lines(text)
    others = [json.loads(text[begin:end]) for begin, end in spans]
    if any(not isinstance(row, dict) or row.get("kind", "step") == "step" for row in others):
        raise ValueError("a line that is not a row, or a step row of another writer")
    for row in others:
        row.pop(CHECKSUM, None)
    if _STEP_BEGINS not in text:
        return Metrics(others=without_repeated(others))
    table = _parsed(text)
    lines = _line_numbers(text, spans)
    is_step = np.ones(len(table), dtype=bool)
    is_step[lines] = False
    starts = [index for index, row in enumerate(others) if row["kind"] == "start"]
    for start in starts[1:]:
        done = others[start].get("updates", others[start]["step"])
        before = table["step"][: lines[start]].fill_null(0).to_numpy()
        is_step[: lines[start]] &= before <= done
    steps = table.filter(pl.Series(is_step))
    nulls = steps["train_loss"].null_count()
    if nulls and nulls > len(_NO_FINITE_LOSS.findall(text)):
        raise ValueError("a step row without a loss")
    return Metrics(steps=_complete(steps), others=without_repeated(others))


def _parsed(text: bytes) -> pl.DataFrame:
    """A row for every line, with the fields of a `step` row."""
    try:
        return pl.read_ndjson(text, schema=STEP_SCHEMA)
    except pl.exceptions.PolarsError:
        if b"NaN" not in text and b"Infinity" not in text:
            raise
        # Python writes them; they are not JSON.
        return pl.read_ndjson(_NOT_FINITE.sub(b"null", text), schema=STEP_SCHEMA)


def _other_lines(text: bytes) -> list[tuple[int, int]]:
    """Begin and end of the lines that are not `step` rows."""
    first = [] if text.startswith(_STEP_BEGINS) else [(0, text.index(b"\n"))]
    return [*first, *((match.start() + 1, match.end()) for match in _NO_STEP_ROW.finditer(text))]


def _line_numbers(text: bytes, spans: Sequence[tuple[int, int]]) -> list[int]:
    """The number of the line at each span, from 0."""
    numbers, number, position = [], 0, 0
    for begin, _ in spans:
        number += text.count(b"\n", position, begin)
        numbers.append(number)
        position = begin
    return numbers
