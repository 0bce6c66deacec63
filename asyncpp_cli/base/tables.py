"""Tables as text, for commands and reports: rich lays them out, with the columns that fit into the terminal.

A table that is too wide gives up columns until it fits: those with the same text in all rows are moved below
the table, others hidden, by their order; the first is folded, and further ones are hidden from the right.
What was moved or hidden is named below. Prose is folded between words.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import rich.table
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

_FOLDED = 24
"""Characters of a line that a folded column keeps at least, if it has that many."""
_NUMBER = re.compile(r"[-+]?[\d,.]*\d(e[-+]?\d+)?( ?%)?( ± [\d,.]+| to [\d,.]+)?|-")


@dataclass(frozen=True, kw_only=True)
class Heading:
    """A column's heading, and how the column gives way where the table is too wide."""

    title: str
    """In one or several lines."""
    break_title: bool = False
    """Whether the title is broken at its blanks where the column is narrower."""
    key: str = ""
    """Name of the quantity; may be empty."""
    right: bool = False
    """Whether the column is aligned right."""
    secondary: bool = False
    """Whether a phone hides the column until it is asked to show all, as it does those with an order."""
    extra: bool = False
    """Whether every page does."""
    share: int | None = None
    """Place in the order of giving way: moved below the table, if all rows have the same text."""
    hide: int | None = None
    """Place in the same order: hidden."""
    fold: bool = False
    """Prose, which may be folded between words."""

    @property
    def gives_way(self) -> bool:
        """Whether it has an order."""
        return self.share is not None or self.hide is not None


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text in rows and columns."""

    headings: Sequence[Heading]
    rows: Sequence[Sequence[str]]
    states: Sequence[str] = ()
    """The state of each row's cell; empty where a row has none or several."""
    same: Sequence[str] = ()
    """Titles and values of columns that were moved below the table."""
    hidden: Sequence[str] = ()
    """Titles of columns without room."""
    legend: str = ""
    """How to read the table."""

    @property
    def remarks(self) -> list[str]:
        """The lines below the table."""
        lines = [self.legend] if self.legend else []
        if self.same:
            lines.append(f"Same in all rows: {', '.join(self.same)}")
        if self.hidden:
            lines.append(f"Columns hidden at this width: {', '.join(self.hidden)}")
        return lines

    def width(self, *, gap: int = 1) -> int:
        """Fewest characters of a line, with `gap` blanks between the columns."""
        return sum(map(self._least, range(len(self.headings)))) + gap * (len(self.headings) - 1)

    def without(self, keys: Collection[str]) -> Table:
        """The table without the columns of these keys."""
        return self._chosen([place for place, each in enumerate(self.headings) if each.key not in keys])

    def _chosen(self, places: Sequence[int]) -> Table:
        return replace(
            self,
            headings=[self.headings[place] for place in places],
            rows=[[row[place] for place in places] for row in self.rows],
        )

    def fitted(self, width: int | None, *, essential: bool = True) -> Table:
        """The table with as many columns as fit into lines of `width` characters.

        The remarks name a column that gave way and has texts: with its text, if that is the same in all rows.

        Args:
            width: characters of a line; None: any number.
            essential: whether columns without an order may give way, too.
        """
        if width is None:
            return self
        headings = list(self.headings)
        least = dict(enumerate(map(self._least, range(len(headings)))))
        given: list[int] = []

        def too_wide() -> bool:
            return sum(least.values()) + len(least) - 1 > width

        def narrow(order: Iterable[int]) -> None:
            for place in order:
                if place in least and too_wide():
                    del least[place]
                    given.append(place)

        narrow(self._giving_way())
        if essential and too_wide():
            first, *later = least
            headings[first] = replace(headings[first], fold=True)
            least[first] = min(least[first], _FOLDED)
            narrow(place for place in reversed(later) if not headings[place].fold)
        texts = {place: sorted({row[place] for row in self.rows}) for place in given}
        titles = [one_line(heading.title) for heading in headings]
        same = [f"{titles[place]} {each[0]}" for place, each in texts.items() if len(each) == 1 and each[0]]
        hidden = [titles[place] for place in sorted(given) if len(texts[place]) != 1]
        return replace(
            replace(self, headings=headings)._chosen(list(least)),
            same=[*self.same, *same],
            hidden=[*self.hidden, *hidden],
        )

    def text(self, width: int | None, *, rule: bool = True, styles: Mapping[str, str] | None = None) -> Text:
        """The table's lines, the remarks below them.

        Args:
            width: characters of a line, for a table that is `fitted` to them; None: as many as it takes.
            rule: whether a line is drawn below the headings.
            styles: of the texts in the column `status`, by the row's state.
        """
        if width is None and not rule:
            return Text("\n".join([*self._plain_lines(), *self.remarks]))
        gap = 2 if width is None or self.width(gap=2) <= width else 1
        box = SIMPLE_HEAD if rule else None  # it has a blank between columns
        table = rich.table.Table(
            box=box, show_edge=False, pad_edge=False, padding=(0, gap - rule, 0, 0), header_style="bold"
        )
        titles = [self._title(place, whole=width is None) for place in range(len(self.headings))]
        widths = self._widths(width, gap)
        tallest = max((title.count("\n") for title in titles), default=0)
        for place, heading in enumerate(self.headings):
            table.add_column(
                Text("\n" * (tallest - titles[place].count("\n")) + titles[place]),
                justify="right" if heading.right else "left",
                no_wrap=not heading.fold or width is None,
                overflow="fold",
                width=widths[place],
            )
        for number, row in enumerate(self.rows):
            style = (styles or {}).get(self.states[number], "") if self.states else ""
            named = zip(row, self.headings, strict=True)
            table.add_row(*(Text(text, style if heading.key == "status" else "") for text, heading in named))
        lines = Console(width=width or 10**6).render_lines(table, pad=False) if self.headings else []
        drawn = [Text.assemble(*((part.text, part.style or "") for part in line)) for line in lines]
        for line in drawn:
            line.rstrip()
        return Text("\n").join(
            [*drawn, *(Text(line) for remark in self.remarks for line in wrapped(remark, width))]
        )

    def _plain_lines(self) -> Iterator[str]:
        """The lines for a file or a pipe, where rich's layout of a thousand rows takes half a second."""
        columns = []
        for place, heading in enumerate(self.headings):
            texts = [self._title(place, whole=True), *(row[place] for row in self.rows)]
            widths = [cell_len(text) for text in texts]
            widest = max(widths)
            blanks = [" " * (widest - width) for width in widths]
            pairs = zip(blanks, texts, strict=True) if heading.right else zip(texts, blanks, strict=True)
            columns.append(list(map("".join, pairs)))
        yield from ("  ".join(line).rstrip() for line in zip(*columns, strict=True))

    def _giving_way(self) -> Iterator[int]:
        """Columns in the order in which they give way; others do so last, from the right."""
        places = range(1, len(self.headings))
        yield from (place for place in places if not any(row[place] for row in self.rows))
        orders = [(heading.share, False, place) for place, heading in enumerate(self.headings)]
        orders += [(heading.hide, True, place) for place, heading in enumerate(self.headings)]
        for _, hide, place in sorted(each for each in orders if each[0] is not None):
            if hide or len({row[place] for row in self.rows}) == 1:
                yield place

    def _title(self, place: int, *, whole: bool) -> str:
        """A heading's title in the lines that its column has room for."""
        heading = self.headings[place]
        if whole:
            return one_line(heading.title)
        if not heading.break_title:
            return heading.title
        return "\n".join(textwrap.wrap(heading.title, max(1, self._natural(place)), break_long_words=False))

    def _widths(self, width: int | None, gap: int) -> list[int | None]:
        """Widths of folded columns, which share the room that the others leave; None: as wide as needed."""
        widths: list[int | None] = [None] * len(self.headings)
        if width is None:
            return widths
        folded = [place for place, heading in enumerate(self.headings) if heading.fold]
        others = [self._natural(place) for place in range(len(self.headings)) if place not in folded]
        room = width - gap * (len(self.headings) - 1) - sum(others)
        for number, place in enumerate(sorted(folded, key=self._natural)):
            widths[place] = own = min(self._natural(place), max(1, room // (len(folded) - number)))
            room -= own
        return widths

    def _natural(self, place: int) -> int:
        """Width of a column that is not folded."""
        heading = self.headings[place]
        parts = heading.title.split() if heading.break_title else heading.title.split("\n")
        return max(map(cell_len, ["", *parts, *(row[place] for row in self.rows)]))

    def _least(self, place: int) -> int:
        """Fewest characters of a column."""
        natural = self._natural(place)
        return min(natural, _FOLDED) if self.headings[place].fold else natural


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How the columns of a table give way, by their titles."""

    share: Collection[str] = ()
    """Moved below the table first, if all rows have the same text."""
    hide: Sequence[str] = ()
    """Hidden next, in this order."""
    fold: Collection[str] = ()
    """Prose, folded between words."""


def table_of(columns: Sequence[str], rows: Sequence[Sequence[str]], *, fit: Fit | None = None) -> Table:
    """A table; columns of numbers are aligned right.

    Args:
        columns: headings.
        rows: one text for each column.
        fit: how columns give way where the table is too wide; None: the last one first.
    """
    fit = fit or Fit()
    headings = []
    for place, title in enumerate(columns):
        texts = [row[place] for row in rows if row[place]]
        headings.append(
            Heading(
                title=title,
                break_title="\n" not in title,
                right=bool(texts) and all(map(_NUMBER.fullmatch, texts)),
                share=0 if title in fit.share and len(rows) > 1 else None,
                hide=fit.hide.index(title) + 1 if title in fit.hide else None,
                fold=title in fit.fold,
            )
        )
    return Table(headings=headings, rows=rows)


def one_line(title: str) -> str:
    """A title on one line."""
    return " ".join(title.replace("/\n", "/").replace("\n/", "/").split())


def wrapped(text: str, width: int | None) -> list[str]:
    """The text in lines, broken between words."""
    return [text] if width is None else textwrap.wrap(text, width, break_on_hyphens=False) or [""]


def printed(axis: str, value: Any) -> str:
    """A value of an axis, for display."""
    if axis == "error_feedback":
        return f"{value:g}" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
