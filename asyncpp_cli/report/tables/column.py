"""A column of a report: one declaration for the fields in records and the texts in tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from asyncpp_cli.base.console import encodable
from asyncpp_cli.report.analysis.cells import CellResult
from asyncpp_cli.report.analysis.statistics import Interval, Spread

NOTHING = "-"
"""Text of a cell without a value."""

Value = Callable[[CellResult], Any]
Text = Callable[[CellResult], str]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A quantity of a cell."""

    key: str
    """Name of its field in records and for `--value`."""
    fields: Mapping[str, Value]
    """Values in records, by the suffix of the field's name (`_std`, `_low`; empty: the key alone)."""
    title: str = ""
    """Heading in tables, in one or several lines; empty: in records only."""
    text: Text = lambda _: NOTHING
    """What a table shows; `NOTHING` where there is no value."""
    right: bool = True
    """Numbers are aligned right."""
    always: bool = False
    """Shown even if no cell has a value."""
    move_order: int | None = None
    """Order in which a narrow table moves columns with the same text in every row below the table."""
    drop_order: int | None = None
    """Order in which a narrow table leaves columns out, in one sequence with `move_order`."""

    secondary: bool = False
    """Hidden on phones, as are the columns with such an order."""
    extra: bool = False
    """Hidden on the page until all columns are asked for."""

    def record(self, cell: CellResult) -> dict[str, Any]:
        """The cell's fields, as JSON can hold them."""
        return {f"{self.key}{end}": as_plain(value(cell)) for end, value in self.fields.items()}


def single(
    key: str,
    title: str = "",
    value: Value | None = None,
    *,
    form: str = "{}",
    text: Text | None = None,
    **options: Any,
) -> Column:
    """A column of one field.

    Args:
        key: name of the field.
        title: heading in tables; empty: in records only.
        value: of a cell; None: its attribute `key`.
        form: format of the value in tables.
        text: of a cell in tables, instead of the formatted value.
        **options: further fields of `Column`.
    """
    get = value or attrgetter(key)
    shown = text or (lambda cell: formatted(get(cell), form))
    return Column(key=key, title=title, fields={"": get}, text=shown, **options)


def averaged(
    key: str,
    title: str = "",
    value: Callable[[CellResult], Spread | None] | None = None,
    *,
    form: str,
    text: Text | None = None,
    show_std: bool = False,
    **options: Any,
) -> Column:
    """A column of a `Spread`, with two fields: mean and standard deviation. Arguments as of `single`, and:

    Args:
        value: of a cell; None: over its seeds, of the attribute `key` of `Measurement`.
        show_std: whether tables show the standard deviation behind the mean.
    """
    get = value or (lambda cell: cell.spread(key))

    def mean_and_std(cell: CellResult) -> str:
        over_seeds = get(cell)
        if over_seeds is None:
            return NOTHING
        mean = form.format(over_seeds.mean)
        return mean if over_seeds.std is None or not show_std else f"{mean}±{form.format(over_seeds.std)}"

    fields = {"": _part(get, "mean"), "_std": _part(get, "std")}
    return Column(key=key, title=title, fields=fields, text=text or mean_and_std, **options)


def interval_fields(value: Callable[[CellResult], Interval | None]) -> dict[str, Value]:
    """The fields of an interval: its lower and upper bound."""
    return {"_low": _part(value, "low"), "_high": _part(value, "high")}


def _part(get: Value, name: str) -> Value:
    return lambda cell: getattr(get(cell), name, None)


def formatted(value: float | None, form: str) -> str:
    """The number as tables show it."""
    return NOTHING if value is None else form.format(value)


def as_plain(value: Any) -> Any:
    """The value as JSON can hold it: None for a number that is not finite, text in UTF-8."""
    if isinstance(value, list):
        return [as_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, str):
        return encodable(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
