"""What people read: remarks go to standard error, what they asked to see to standard output."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncpp_cli.plain_text import printable, printable_lines
from asyncpp_cli.streams import steering
from asyncpp_cli.tables import Narrow, compact, ruled_width


def say(message: str, *, one_line: bool = False) -> None:
    """A remark for people, on standard error. That nobody can be told is no reason to end.

    Args:
        message: may hold names and reasons of any kind; control characters in them are replaced.
        one_line: put it on one line, whatever ends of lines it has.
    """
    text = printable(message) if one_line else printable_lines(message)
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def console(*, errors: bool = False, **options: Any) -> Console:
    """A console on standard output or error; it may steer the terminal, so its texts must be `printable`."""
    return Console(file=steering(sys.stderr if errors else sys.stdout), highlight=False, **options)


def command(*words: str | Path) -> str:
    """A command of ours as one would type it, for hints: paths quoted, and never taken for an option."""
    return " ".join(["asyncpp", *(quoted(word) for word in words)])


def quoted(word: str | Path) -> str:
    """A word for a shell; a path that begins with a dash is no option then."""
    dashed = isinstance(word, Path) and str(word).startswith("-")
    return shlex.quote(f"./{word}" if dashed else str(word))


def show_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str, narrow: Narrow | None = None
) -> None:
    """A table on standard output: ruled on a terminal, in plain columns otherwise.

    Args:
        columns: headings.
        rows: one text for each column.
        title: stands above it.
        narrow: what may be left out on a terminal that is too narrow; None: cells are folded there.
    """
    shown_on = console()
    title = printable(title)
    rows = [[printable(cell) for cell in row] for row in rows]
    if not shown_on.is_terminal:
        widths = [max(len(row[index]) for row in [columns, *rows]) for index in range(len(columns))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in [columns, *rows]
        ]
        print("\n".join([title, *(line.rstrip() for line in lines)]))
        return
    shown_on.print(table_of(columns, rows, title=title, width=shown_on.width, narrow=narrow))


def table_of(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str,
    width: int,
    narrow: Narrow | None = None,
) -> Table | Text:
    """The same for a terminal: ruled, or compact where that is wider than `width` letters."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if narrow is not None and ruled_width(columns, rows) > width:
        return Text(compact(columns, rows, width=width, title=printable(title), narrow=narrow), no_wrap=True)
    table = Table(title=Text(printable(title)), title_justify="left")
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for row in rows:
        # As Text: brackets in a user's text are no markup.
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def duration(seconds: float) -> str:
    """`75 s` as `1:15`, with hours where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
