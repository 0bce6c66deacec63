"""The metrics of a run: the many `step` rows as a data frame, the few others by kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, get_args

import polars as pl
from msgspec import structs

from asyncpp_cli.runs.run_folder import Run
from stages.rows import Count, End, Evaluation, Pause, Row, Segment, Start, Step, read

_COLUMN_TYPES = {Count: pl.Int64(), float: pl.Float64(), bool: pl.Boolean()}


def _column_type(annotation: Any) -> pl.DataType:
    known = [each for each in get_args(annotation) if each is not type(None)]
    return _COLUMN_TYPES[known[0] if isinstance(annotation, UnionType) else annotation]


STEP_SCHEMA: dict[str, pl.DataType] = {each.name: _column_type(each.type) for each in structs.fields(Step)}
"""The columns of `Metrics.steps`: the fields of a `step` row."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The valid rows of a run: rows of steps that a later attempt repeated are left out."""

    steps: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=STEP_SCHEMA))
    """A `train_loss` of null is NaN."""
    starts: Sequence[Start] = ()
    evaluations: Sequence[Evaluation] = ()
    segments: Sequence[Segment] = ()
    pauses: Sequence[Pause] = ()
    ends: Sequence[End] = ()
    torn: int = 0
    """Number of lines that are not JSON objects, also left out."""

    @property
    def start(self) -> Start | None:
        """The row of the last attempt."""
        return self.starts[-1] if self.starts else None

    @property
    def is_empty(self) -> bool:
        others = (self.starts, self.evaluations, self.segments, self.pauses, self.ends)
        return not len(self.steps) and not any(others)


def read_metrics(run: Run) -> Metrics:
    """The metrics of a run; empty if the file is missing.

    Raises:
        RowError: a row lacks a field of its kind, or has a value of another type in it.
    """
    rows, torn = read(run.metrics_lines())
    return by_kind(rows, torn=torn)


def by_kind(rows: Iterable[Row], *, torn: int = 0) -> Metrics:
    """Valid rows as `Metrics`."""
    found: dict[type[Row], list[Any]] = {kind: [] for kind in (Step, Start, Evaluation, Segment, Pause, End)}
    for row in rows:
        found[type(row)].append(row)
    columns = {name: [getattr(row, name) for row in found[Step]] for name in STEP_SCHEMA}
    steps = pl.DataFrame(columns, schema=STEP_SCHEMA)
    return Metrics(
        steps=steps.with_columns(pl.col("train_loss").fill_null(float("nan"))),
        starts=found[Start],
        evaluations=found[Evaluation],
        segments=found[Segment],
        pauses=found[Pause],
        ends=found[End],
        torn=torn,
    )
