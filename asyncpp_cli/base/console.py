"""Output for people: remarks go to standard error, results to standard output."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.base.plain_text import printable, printable_lines
from asyncpp_cli.base.standard_streams import steering
from asyncpp_cli.base.tables import Fit, table_of, wrapped

_MOST_PROBLEMS = 20


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


def refuse_all(problems: Sequence[str]) -> None:
    """Refuse what has these problems; all but the last are printed.

    Raises:
        UserError: there are any.
    """
    *others, last = problems or [""]
    for problem in others[:_MOST_PROBLEMS]:
        say(f"asyncpp: error: {problem}", one_line=True)
    if more := len(others[_MOST_PROBLEMS:]):
        say(f"asyncpp: error: {more} further problems", one_line=True)
    if last:
        raise UserError(last)


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
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str, fit: Fit | None = None
) -> None:
    """Print a table: fitted to a terminal, with all columns elsewhere.

    Args:
        columns: headings.
        rows: one text for each column.
        title: printed above the table.
        fit: how columns give way on a narrow terminal.
    """
    output = console()
    if output.is_terminal:
        output.print(
            shown_table(columns, rows, title=title, width=output.width, fit=fit), no_wrap=True, crop=False
        )
    else:
        print(shown_table(columns, rows, title=title, width=None, fit=fit).plain)


def show_line(text: str) -> None:
    """Print a line of a result: broken between words on a terminal, whole elsewhere."""
    output = console()
    print("\n".join(wrapped(printable(text), output.width if output.is_terminal else None)))


def shown_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str,
    width: int | None,
    fit: Fit | None = None,
) -> Text:
    """The table with its title, in lines of `width` characters; None: of any length, one for each row."""
    table = table_of(columns, [[printable(cell) for cell in row] for row in rows], fit=fit)
    lines = [Text(line) for line in wrapped(printable(title), width)]
    return Text("\n").join([*lines, table.fitted(width).text(width, rule=width is not None)])


def roughly(seconds: float) -> str:
    """Seconds in the unit that suits them: `40 seconds`, `4.5 minutes`, `12 hours`, `3.1 days`."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if (value := seconds / size) >= 1.5:
            return f"{value:.{0 if value >= 9.5 else 1}f} {unit}"
    return f"{seconds:.0f} seconds"


def duration(seconds: float) -> str:
    """Seconds as minutes and seconds, `1:15`, with hours if there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
