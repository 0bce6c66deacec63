"""A report for machines: each cell as a record of plain numbers, and the records as JSON, CSV and Parquet."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from asyncpp_cli.plain_text import encodable, printable
from asyncpp_cli.report.cells import Cell
from asyncpp_cli.report.conditions import conditions
from asyncpp_cli.report.statistics import Interval, Spread

_BEGIN_FORMULAS = ("=", "+", "-", "@")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


def record(cell: Cell) -> dict[str, Any]:
    """A cell's numbers as they are; None where there is none (and for one that is not finite)."""
    fields: dict[str, Any] = {
        "schedule": cell.schedule,
        "optimizer": cell.optimizer,
        # The coefficient, also where it is off (0) or on (1): a column of one type.
        "error_feedback": float(cell.error_feedback),
        "model": cell.model,
        **cell.axes,
        "status": cell.state,
        "progress": cell.progress,
        "reason": "; ".join(cell.reasons) or None,
        "n": cell.n,
    }
    fields |= _spread("val_loss", cell.val_loss)
    fields |= _spread("bits_per_byte", cell.bits_per_byte)
    fields["unigram_bits_per_byte"] = cell.unigram_bits_per_byte
    fields |= _spread("perplexity", cell.perplexity)
    fields["gap"] = cell.gap
    fields |= _interval("gap", cell.gap_interval)
    paired = cell.gap_pairs
    fields |= _interval("gap_welch", paired.interval_welch if paired is not None else None)
    fields["gap_seeds"] = paired.seeds if paired is not None else []
    fields["gap_seeds_missing"] = list(paired.unpaired) if paired is not None else []
    fields["update_ratio"] = cell.update_ratio
    fields["baseline"] = cell.baseline.schedule if cell.baseline is not None else None
    fields["recovered"] = cell.recovered
    if cell.target is not None:
        fields |= _target(cell)
    fields |= _spread("tokens_per_second", cell.tokens_per_second)
    fields |= _spread("tokens_per_second_per_rank", cell.tokens_per_second_per_rank)
    fields["throughput_ratio"] = cell.throughput_ratio
    fields |= _spread("mfu", cell.utilisation)
    fields["delay"] = cell.delay
    fields |= _spread("bubble", cell.bubble)
    fields["bubble_predicted"] = cell.bubble_predicted
    fields["busy_by_rank"] = cell.busy_by_rank
    memory = cell.peak_memory
    fields["peak_memory_min"] = min(memory, default=None)
    fields["peak_memory_max"] = max(memory, default=None)
    fields["peak_memory_by_rank"] = memory
    fields["skipped_steps"] = cell.skipped_steps
    fields["restarts"] = cell.restarts
    fields["runs"] = [run.id for run in cell.runs]
    fields["conditions"] = _conditions(cell)
    return {key: finite(value) for key, value in fields.items()}


def _target(cell: Cell) -> dict[str, Any]:
    reached = cell.reached
    return {
        "target": cell.target,
        "target_reached": reached.runs if reached is not None else None,
        "target_steps": _mean(reached.steps if reached is not None else None),
        "target_tokens": _mean(reached.tokens if reached is not None else None),
        "target_seconds": _mean(reached.seconds if reached is not None else None),
        "target_time_ratio": cell.time_to_target_ratio,
    }


def _mean(value: Spread | None) -> float | None:
    return None if value is None else value.mean


def _spread(name: str, value: Spread | None) -> dict[str, float | None]:
    return {name: value.mean if value else None, f"{name}_std": value.std if value else None}


def _interval(name: str, value: Interval | None) -> dict[str, float | None]:
    return {f"{name}_low": value.low if value else None, f"{name}_high": value.high if value else None}


def finite(value: Any) -> Any:
    """The value as JSON and Parquet can have it: None for a number that is not finite, texts in UTF-8."""
    if isinstance(value, list):
        return [finite(one) for one in value]
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, str):
        return encodable(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _conditions(cell: Cell) -> dict[str, Any]:
    """Each condition's value; a list where the cell's runs differ, None where it is unknown."""
    return {
        name: values[0] if len(values) == 1 else values or None
        for name, values in conditions(cell.runs).items()
    }


def to_json(cells: Sequence[Cell]) -> str:
    """A list of cells; with each, the ids of its runs and the conditions that they ran under."""
    return json.dumps([record(cell) for cell in cells], indent=2, allow_nan=False) + "\n"


def flat_records(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The same with conditions as fields of their own."""
    flat = []
    for cell in cells:
        fields = record(cell)
        flat.append(fields | fields.pop("conditions"))
    return flat


def to_csv(cells: Sequence[Cell]) -> str:
    """The same as the JSON, a line a cell: conditions in the last columns, an empty field for nothing, a list
    as JSON."""
    rows = flat_records(cells)
    names = list(rows[0]) if rows else ["schedule"]
    return csv_text([names, *([_list_as_json(row[name]) for name in names] for row in rows)])


def _list_as_json(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list) else value


def csv_text(rows: Sequence[Sequence[Any]]) -> str:
    """Rows as CSV, the first one the header; nothing where there is None."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([defused(value) for value in row] for row in rows)
    return stream.getvalue()


def defused(value: Any) -> Any:
    """The value; with an apostrophe before a text that a spreadsheet would take for a formula.

    A text that is a number (`-0.5`) stays. OWASP, "CSV Injection".
    """
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(_BEGIN_FORMULAS) and _NUMBER.fullmatch(text) is None else text


def to_parquet(cells: Sequence[Cell]) -> bytes:
    """The same as the CSV, with the types kept, lists included; a column of several types is
    text."""
    import polars as pl

    rows = flat_records(cells)
    columns: dict[str, list[Any]] = {
        name: [row[name] for row in rows] for name in (rows[0] if rows else ["schedule"])
    }
    table = pl.DataFrame({name: _one_type(values) for name, values in columns.items()})
    stream = io.BytesIO()
    table.write_parquet(stream)
    return stream.getvalue()


def _one_type(values: list[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return [None if value is None else float(value) for value in values]
    if len(kinds) > 1:
        return [None if value is None else str(_list_as_json(value)) for value in values]
    return values
