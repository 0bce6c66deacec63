"""Output for people: remarks go to standard error, results to standard output."""

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

from asyncpp_cli.errors import UserError
from asyncpp_cli.plain_text import printable, printable_lines
from asyncpp_cli.standard_streams import steering
from asyncpp_cli.tables import Narrow, compact, ruled_width


def say(message: str, *, one_line: bool = False) -> None:
    """Print a remark on standard error; a closed standard error is ignored.

    Args:
        message: may contain untrusted text; control characters are replaced.
        one_line: join its lines.
    """
    text = printable(message) if one_line else printable_lines(message)
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def tell(line: str) -> None:
    """Print a line of results on standard output; control characters of untrusted text are replaced."""
    print(printable_lines(line))


def agreed(question: str, *, refused: str) -> bool:
    """Ask a question on the terminal; returns whether the answer is yes.

    Args:
        question: what to ask.
        refused: what to say after another answer.

    Raises:
        UserError: standard input is not a terminal.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        raise UserError(f"{question} There is no terminal to ask on; --yes (in Python: yes=True) is a yes")
    say(f"{question} [y/N]")
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    say(refused)
    return False


def console(*, errors: bool = False, **options: Any) -> Console:
    """A console on standard output or error; control characters pass: texts must be `printable`."""
    return Console(file=steering(sys.stderr if errors else sys.stdout), highlight=False, **options)


def command(*words: str | Path) -> str:
    """An asyncpp command as typed in a shell, for hints; paths are quoted and cannot be taken for options."""
    return " ".join(["asyncpp", *(quoted(word) for word in words)])


def quoted(word: str | Path) -> str:
    """A word quoted for a shell; a path with a leading dash is made unlike an option."""
    dashed = isinstance(word, Path) and str(word).startswith("-")
    return shlex.quote(f"./{word}" if dashed else str(word))


def show_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str, narrow: Narrow | None = None
) -> None:
    """Print a table: ruled on a terminal, in plain columns otherwise.

    Args:
        columns: headings.
        rows: one text for each column.
        title: printed above the table.
        narrow: what to leave out on a terminal that is too narrow; None: fold cells.
    """
    output = console()
    title = printable(title)
    rows = [[printable(cell) for cell in row] for row in rows]
    if not output.is_terminal:
        widths = [max(len(row[index]) for row in [columns, *rows]) for index in range(len(columns))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in [columns, *rows]
        ]
        print("\n".join([title, *(line.rstrip() for line in lines)]))
        return
    output.print(table_of(columns, rows, title=title, width=output.width, narrow=narrow))


def table_of(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str,
    width: int,
    narrow: Narrow | None = None,
) -> Table | Text:
    """The table for a terminal: ruled, or compact if that is wider than `width` characters."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if narrow is not None and ruled_width(columns, rows) > width:
        return Text(compact(columns, rows, width=width, title=printable(title), narrow=narrow), no_wrap=True)
    table = Table(title=Text(printable(title)), title_justify="left")
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for row in rows:
        # As Text, so that brackets are not read as markup.
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def duration(seconds: float) -> str:
    """Seconds as minutes and seconds, `1:15`, with hours if there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
