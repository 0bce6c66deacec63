"""Reads a run's metrics: the many `step` rows as a data frame, the few others as they are."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
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
"""Fields that every `step` row has. A `train_loss` of null becomes NaN."""

_STEP_BEGINS = b'{"kind": "step",'


class _Step(msgspec.Struct, gc=False):
    """A `step` row, as msgspec reads it ten times as fast as json."""

    step: int
    tokens: int
    train_loss: float | None
    lr: float | None
    grad_norm: float | None
    skipped: bool
    seconds: float


_decoder = msgspec.json.Decoder(_Step)


def _no_steps() -> pl.DataFrame:
    return pl.DataFrame(schema=STEP_SCHEMA)


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The valid rows of a run: rows of steps that a later attempt repeated are left out."""

    steps: pl.DataFrame = field(default_factory=_no_steps)
    others: Sequence[MetricsRow] = ()
    torn: int = 0
    """Number of lines that are not JSON objects, also left out."""


def read_metrics(run: Run) -> Metrics:
    """The metrics of a run; empty if the file is missing.

    Raises:
        KeyError, TypeError or ValueError: a `step` row lacks a field, or has a value of another type in it.
    """
    try:
        text = run.metrics_file.read_bytes()
    except FileNotFoundError:
        return Metrics()
    with contextlib.suppress(msgspec.MsgspecError, OverflowError, RecursionError, ValueError):
        return _read_fast(text)
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


def _read_fast(text: bytes) -> Metrics:
    """Read a file whose lines are all complete, and its `step` rows as asyncpp writes them.

    Raises:
        msgspec.MsgspecError, OverflowError, RecursionError or ValueError: a line is not, or has another form.
    """
    steps: list[_Step] = []
    others: list[dict[str, Any]] = []
    for line in text.splitlines():
        if line.startswith(_STEP_BEGINS):
            steps.append(_step(line))
            continue
        row = json.loads(line)
        if not isinstance(row, dict) or row.get("kind", "step") == "step":
            raise ValueError("a line that is not a row, or a step row of another writer")
        row.pop(CHECKSUM, None)
        others.append(row)
        if row["kind"] == "start":
            done = row["updates"] if "updates" in row else row["step"]
            steps = [step for step in steps if step.step <= done]
    columns = {name: [getattr(step, name) for step in steps] for name in STEP_SCHEMA}
    return Metrics(
        steps=_complete(pl.DataFrame(columns, schema=STEP_SCHEMA)), others=without_repeated(others)
    )


def _step(line: bytes) -> _Step:
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError:
        # NaN and Infinity, which Python writes, are not JSON.
        return msgspec.convert(json.loads(line), _Step)
