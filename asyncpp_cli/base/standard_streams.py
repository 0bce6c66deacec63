"""Makes the standard streams robust.

The descriptor of a closed stream is occupied, so that no other file gets its number. Characters outside the
terminal's encoding are escaped. Control characters reach a terminal only through `asyncpp_cli.base.console`.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, TextIO, cast

from asyncpp_cli.base.errors import doing
from asyncpp_cli.base.plain_text import printable_lines

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
    """The same stream, letting control characters through; untrusted text must be `printable`."""
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
