"""Tables as text, for commands and reports, fitted to the terminal.

A table that is too wide gives way in this order, until it fits: columns are moved below the table where all
rows have the same text, or hidden, by their order; prose is folded between words, or printed below its row;
the first column is folded after punctuation; the remaining columns are hidden from the right. Nothing is cut
inside a number or a word, and what was hidden is named below the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.cells import cell_len
from rich.text import Text

_FOLDED = 24
"""Characters of a line that a folded column keeps at least, if it has that many."""
_INDENT = "    "
_NUMBER = re.compile(r"[-+]?[\d,.]*\d(e[-+]?\d+)?( ?%)?( ± [\d,.]+| to [\d,.]+)?|-")
_ENDS_OF_PARTS = re.compile(r"(?<=[-/,=_:.])(?![-/,=_:.\d])")


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
    """Whether a phone hides the column until it is asked to show all."""
    share_order: int | None = None
    """Place in the order of giving way: moved below the table, if all rows have the same text."""
    hide_order: int | None = None
    """Place in the same order: hidden."""
    fold: bool = False
    """Prose, which may be folded between words."""
    below: bool = False
    """A note, which may be printed below its row."""


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
        widths = [self._least(place) for place, heading in enumerate(self.headings) if not heading.below]
        return sum(widths) + gap * (len(widths) - 1)

    def fitted(self, width: int | None, *, essential: bool = True) -> Table:
        """The table with as many columns as fit into lines of `width` characters.

        Args:
            width: characters of a line; None: any number.
            essential: whether columns without an order may give way, too.
        """
        table = self
        for narrower, heading in self._steps(essential=essential):
            if width is None or table.width() <= width:
                break
            table = narrower(table, heading)
        titles = [one_line(heading.title) for heading in self.headings]
        hidden = [*self.hidden, *(title for title in titles if title in table.hidden)]
        return replace(table, hidden=hidden)

    def text(
        self,
        width: int | None,
        *,
        rule: bool = True,
        styles: Mapping[str, str] | None = None,
    ) -> Text:
        """The table's lines, the remarks below them.

        Args:
            width: characters of a line, for a table that is `fitted` to them; None: as many as it takes.
            rule: whether a line is drawn below the headings.
            styles: of the texts in the column `status`, by the row's state.
        """
        headings = list(self.headings)
        if width is None:
            headings = [replace(heading, title=one_line(heading.title)) for heading in headings]
        if width is None or self._natural_width() <= width:
            headings = [replace(heading, below=False) for heading in headings]
        gap = 2 if width is None or self.width(gap=2) <= width else 1
        table = replace(self, headings=headings)
        inside = [place for place, heading in enumerate(headings) if not heading.below]
        widths = table._widths(inside, gap, width)
        lines = table._title_lines(inside, widths, gap)
        if rule:
            lines.append(Text("─" * (sum(widths) + gap * (len(widths) - 1))))
        for number, row in enumerate(self.rows):
            style = (styles or {}).get(self.states[number], "") if self.states else ""
            lines += table._row_lines(row, inside, widths, gap, width, style)
        lines += [Text(line) for remark in self.remarks for line in wrapped(remark, width)]
        return Text("\n").join(lines)

    def _steps(self, *, essential: bool) -> Iterator[tuple[Callable[[Table, Heading], Table], Heading]]:
        """In which order which columns give way, and how."""
        later = self.headings[1:]
        yield from ((Table._without, heading) for heading in later if not any(self._texts(heading)))
        steps = [(heading.share_order, heading, True) for heading in self.headings]
        steps += [(heading.hide_order, heading, False) for heading in self.headings]
        for _, place in sorted(
            (order, place) for place, (order, *_) in enumerate(steps) if order is not None
        ):
            _, heading, only_if_same = steps[place]
            if not only_if_same or len(set(self._texts(heading))) == 1:
                yield Table._hiding, heading
        if not essential:
            return
        yield from ((Table._with_note, heading) for heading in reversed(later) if heading.fold)
        yield Table._folding, self.headings[0]
        for heading in reversed(later):
            if not heading.fold and not heading.below:
                yield Table._hiding, heading

    def _texts(self, heading: Heading) -> list[str]:
        place = self._place(heading)
        return [row[place] for row in self.rows]

    def _place(self, heading: Heading) -> int:
        return next(place for place, each in enumerate(self.headings) if each is heading)

    def _hiding(self, heading: Heading) -> Table:
        """Without a column, which the remarks name: with its text, if that is the same in all rows."""
        if not any(each is heading for each in self.headings):
            return self
        title, texts = one_line(heading.title), set(self._texts(heading))
        if len(texts) == 1:
            return replace(self._without(heading), same=[*self.same, f"{title} {texts.pop()}"])
        return replace(self._without(heading), hidden=[*self.hidden, title])

    def _without(self, heading: Heading) -> Table:
        place = self._place(heading)
        rows = [[*row[:place], *row[place + 1 :]] for row in self.rows]
        return replace(self, headings=[each for each in self.headings if each is not heading], rows=rows)

    def _with_note(self, heading: Heading) -> Table:
        return self._with(heading, replace(heading, fold=False, below=True))

    def _folding(self, heading: Heading) -> Table:
        return self._with(heading, replace(heading, fold=True))

    def _with(self, heading: Heading, changed: Heading) -> Table:
        return replace(self, headings=[changed if each is heading else each for each in self.headings])

    def _natural(self, place: int) -> int:
        """Width of a column that is not folded."""
        parts = _parts(self.headings[place])
        return max(map(cell_len, [*parts, *(row[place] for row in self.rows)]))

    def _natural_width(self) -> int:
        return sum(self._natural(place) + 2 for place in range(len(self.headings))) - 2

    def _least(self, place: int) -> int:
        """Fewest characters of a column."""
        heading, natural = self.headings[place], self._natural(place)
        return min(natural, max(_FOLDED, *map(cell_len, _parts(heading)))) if heading.fold else natural

    def _widths(self, inside: Sequence[int], gap: int, width: int | None) -> list[int]:
        """The columns' widths: folded ones share the room that the others leave."""
        widths = {place: self._natural(place) for place in inside}
        if width is None:
            widths = {place: max(widths[place], cell_len(self.headings[place].title)) for place in inside}
        folded = sorted((place for place in inside if self.headings[place].fold), key=lambda at: widths[at])
        if width is not None:
            room = width - gap * (len(inside) - 1) - sum(widths[at] for at in inside if at not in folded)
            for number, place in enumerate(folded):
                share = max(1, room // (len(folded) - number))
                widths[place] = min(widths[place], share)
                room -= widths[place]
        return [widths[place] for place in inside]

    def _title_lines(self, inside: Sequence[int], widths: Sequence[int], gap: int) -> list[Text]:
        """The headings, aligned at the bottom."""
        titles = []
        for place, width in zip(inside, widths, strict=True):
            heading = self.headings[place]
            titles.append(wrapped(heading.title, width) if heading.break_title else _parts(heading))
        tallest = max(map(len, titles))
        padded = [[""] * (tallest - len(title)) + title for title in titles]
        return [
            Text(self._line([title[line] for title in padded], inside, widths, gap), "bold")
            for line in range(tallest)
        ]

    def _row_lines(
        self,
        row: Sequence[str],
        inside: Sequence[int],
        widths: Sequence[int],
        gap: int,
        width: int | None,
        style: str,
    ) -> list[Text]:
        cells = [
            wrapped(row[place], size) if self.headings[place].fold else [row[place]]
            for place, size in zip(inside, widths, strict=True)
        ]
        lines = []
        for number in range(max(map(len, cells))):
            texts = [cell[number] if number < len(cell) else "" for cell in cells]
            lines.append(Text(self._line(texts, inside, widths, gap)))
            for at, place in enumerate(inside):
                if style and self.headings[place].key == "status":
                    begin = sum(widths[:at]) + gap * at
                    lines[-1].stylize(style, begin, begin + widths[at])
        for place in range(len(row)):
            note = row[place]
            if place in inside or not note:
                continue
            assert width is not None
            column = sum(widths) + gap * (len(widths) - 1) + 2
            # To the right of the row, if that has no other note.
            if len(lines) == 1 and lines[0].cell_len < column and column + cell_len(note) <= width:
                lines[0].pad_right(column - lines[0].cell_len)
                lines[0].append(note)
            else:
                lines += [Text(_INDENT + line) for line in wrapped(note, width - len(_INDENT))]
        return lines

    def _line(self, texts: Sequence[str], inside: Sequence[int], widths: Sequence[int], gap: int) -> str:
        cells = []
        for text, place, width in zip(texts, inside, widths, strict=True):
            blanks = " " * (width - cell_len(text))
            cells.append(blanks + text if self.headings[place].right else text + blanks)
        return (" " * gap).join(cells).rstrip()


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How the columns of a table give way, by their titles."""

    share: Collection[str] = ()
    """Moved below the table first, if all rows have the same text."""
    hide: Sequence[str] = ()
    """Hidden next, in this order."""
    fold: Collection[str] = ()
    """Prose, folded between words."""
    below: Collection[str] = ()
    """Notes, printed below their rows."""


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
                share_order=0 if title in fit.share and len(rows) > 1 else None,
                hide_order=fit.hide.index(title) + 1 if title in fit.hide else None,
                fold=title in fit.fold,
                below=title in fit.below,
            )
        )
    return Table(headings=headings, rows=rows)


def one_line(title: str) -> str:
    """A title on one line."""
    return " ".join(title.replace("/\n", "/").replace("\n/", "/").split())


def wrapped(text: str, width: int | None) -> list[str]:
    """The text in lines, broken between words; words that are longer than a line after punctuation."""
    if width is None or cell_len(text) <= width:
        return [text]
    lines = [""]
    for word in text.split():
        gap = " " if lines[-1] else ""
        if cell_len(lines[-1]) + len(gap) + cell_len(word) <= width:
            lines[-1] += gap + word
            continue
        for number, part in enumerate(_ENDS_OF_PARTS.split(word) if cell_len(word) > width else [word]):
            if number > 0 and cell_len(lines[-1]) + cell_len(part) <= width:
                lines[-1] += part
                continue
            lines.append(part)
            # A part without punctuation that is longer than a line.
            while cell_len(lines[-1]) > width:
                lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return lines if lines[0] else lines[1:]


def printed(axis: str, value: Any) -> str:
    """A value of an axis, for display."""
    if axis == "error_feedback":
        return f"{value:g}" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _parts(heading: Heading) -> list[str]:
    """The pieces of a title that are not broken."""
    return (heading.title.split() if heading.break_title else heading.title.split("\n")) or [""]
