"""What commands print and read: remarks on standard error, results on standard output, answers to questions,
numbers and files in options.

Untrusted text (names, reasons of errors, logs) loses its control characters. The descriptor of a closed
stream is occupied, so that no other file gets its number. Characters outside the terminal's encoding are
escaped.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import shlex
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import typer
from rich.console import Console
from rich.text import Text

from asyncpp_cli.base.errors import UserError, doing
from asyncpp_cli.base.outputs import check_output
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


_NAMES = {0: "standard input", 1: "standard output", 2: "standard error"}


class _NamedFile(io.FileIO):
    """A stream whose write errors name it."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self._number = number

    def write(self, content: object) -> int | None:  # type: ignore[override]
        with doing("written", _NAMES[self._number]):
            return super().write(content)  # type: ignore[arg-type]


class Stream(io.TextIOWrapper):
    """Standard output or error; on a terminal, control characters are replaced."""

    def write(self, text: str) -> int:
        return super().write(printable_lines(text) if self.isatty() else text)


class _Steering:
    """A `Stream` that lets control characters through, for colours and progress bars."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def steering(stream: TextIO) -> TextIO:
    """A stream to the same output, letting control characters through; untrusted text must be `printable`."""
    return cast(TextIO, _Steering(stream)) if isinstance(stream, Stream) else stream


def make_fit() -> None:
    """Replace standard output and error by a `Stream`, unless they were redirected within Python."""
    for number in _NAMES:
        _fill(number)
    for number, name in ((1, "stdout"), (2, "stderr")):
        present, own = getattr(sys, name), getattr(sys, f"__{name}__")
        if isinstance(present, Stream) or present is not own:
            continue  # already replaced, or captured
        file = _NamedFile(number)
        stream = Stream(
            io.BufferedWriter(file),
            encoding="utf-8" if present is None else present.encoding,
            errors="backslashreplace",
            line_buffering=number == 2 or file.isatty(),
            write_through=present is not None and present.write_through,
        )
        setattr(sys, name, stream)


def _fill(number: int) -> None:
    """Occupy the descriptor of a closed stream, so that no file gets it. Writing results still fails."""
    try:
        os.fstat(number)
    except OSError:
        # Losing remarks is acceptable; losing results must raise an error.
        opened = os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)


def abandon_output() -> None:
    """Discard buffered standard output that cannot be written; the interpreter would retry at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(null, sys.stdout.fileno())
    os.close(null)


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_SURROGATE = re.compile("[\ud800-\udfff]")
_LINE_END = re.compile(r"\r\n?")


def encodable(text: str) -> str:
    """`text` without lone surrogates (bytes of names that are not UTF-8), so that UTF-8 can encode it."""
    return _SURROGATE.sub(REPLACEMENT, text)


def as_plain(value: Any) -> Any:
    """The value as JSON can hold it: None for a number that is not finite, text in UTF-8."""
    if isinstance(value, list):
        return [as_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, str):
        return encodable(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def printable(text: object) -> str:
    """`text` on one line without control characters, so that it cannot control a terminal or break a row."""
    return printable_lines(" ".join(str(text).split()))


def printable_lines(text: str) -> str:
    """`text` without control characters except line ends and tabs; a carriage return becomes a line end."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        REPLACEMENT if unicodedata.category(character)[0] == "C" and character not in "\n\t" else character
        for character in _LINE_END.sub("\n", text)
    )


def finite(text: str | float) -> float:
    """The value of an option that takes a number: every such option has this `parser`.

    Raises:
        typer.BadParameter: the text is not a number, or is infinite or NaN.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise typer.BadParameter(f"{text!r}, accepted: a finite number")
    return number


def to_write(file: Path | None) -> Path | None:
    """The value of an option that names a file to write: every such option has this `callback`. It is refused
    before the work whose result it gets.

    Raises:
        UserError or OSError: it cannot be written.
    """
    if file is not None:
        check_output(file)
    return file
