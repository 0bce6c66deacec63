"""A column of a report: one quantity of each cell, as text for tables and as fields for records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from asyncpp_cli.base.console import as_plain
from asyncpp_cli.base.tables import Heading
from asyncpp_cli.report.analysis.cells import CellResult
from asyncpp_cli.report.analysis.statistics import Interval, Spread

NOTHING = "-"
"""Text of a cell without a value."""

Value = Callable[[CellResult], Any]
Text = Callable[[CellResult], str]

WHOLE = {"": ""}
MEAN = {"": "mean", "_std": "std"}
ENDS = {"_low": "interval.low", "_high": "interval.high"}
"""Fields of a number, of a mean over seeds and of an interval (`Column.parts`)."""


@dataclass(frozen=True, kw_only=True)
class Column(Heading):
    """A quantity of a cell, below its heading.

    Its key is the name of the field in records and for `--value`; without a title it is in records only.
    """

    value: Value
    parts: Mapping[str, str] = field(default_factory=lambda: WHOLE)
    """The fields in records: for each suffix of the name the attribute of the value; empty: the value."""
    form: str = "{}"
    """Format of the number in tables."""
    own_text: Text | None = None
    """What a table shows, if that is not the number with half of its interval."""
    always: bool = False
    """Shown even if no cell has a value."""

    def record(self, cell: CellResult) -> dict[str, Any]:
        """The cell's fields, as JSON can hold them."""
        value = self.value(cell)
        return {f"{self.key}{end}": as_plain(part_of(value, path)) for end, path in self.parts.items()}

    def text(self, cell: CellResult) -> str:
        """What a table shows; `NOTHING` where there is no value."""
        if self.own_text is not None:
            return self.own_text(cell)
        value = self.value(cell)
        interval = value.interval if value is not None and "_low" in self.parts else None
        return with_half(formatted(part_of(value, self.parts[""]), self.form), interval, self.form)


def part_of(value: Any, path: str) -> Any:
    """An attribute of a value, whose names are separated by dots; None if there is no value on the way."""
    for name in filter(None, path.split(".")):
        value = getattr(value, name, None)
    return value


def single(
    key: str,
    title: str = "",
    value: Value | None = None,
    *,
    text: Text | None = None,
    right: bool = True,
    **how: Any,
) -> Column:
    """A column of one number.

    Args:
        key: name of the field.
        title: heading in tables; empty: in records only.
        value: of a cell; None: its attribute `key`.
        text: `own_text`.
        right: whether tables align it right.
        **how: further fields of `Column`.
    """
    value = value or attrgetter(key)
    return Column(key=key, title=title, right=right, value=value, own_text=text, **how)


def averaged(
    key: str,
    title: str = "",
    value: Callable[[CellResult], Spread | None] | None = None,
    *,
    show_interval: bool = False,
    **options: Any,
) -> Column:
    """A column of a mean over seeds, with its standard deviation as a field. Arguments as of `single`, and:

    Args:
        value: of a cell; None: over its seeds, of the attribute `key` of a run.
        show_interval: whether tables show the mean's interval, which is in two further fields.
    """
    parts = MEAN | ENDS if show_interval else MEAN
    return single(key, title, value or (lambda cell: cell.spread(attrgetter(key))), parts=parts, **options)


def with_half(text: str, interval: Interval | None, form: str) -> str:
    """A number's text with half of the interval around it."""
    return text if interval is None else f"{text}±{form.format(interval.half_width)}"


def formatted(value: float | None, form: str) -> str:
    """The number as tables show it."""
    return NOTHING if value is None else form.format(value)
