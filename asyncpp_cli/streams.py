"""The standard streams, made fit for whatever the system and the user's texts do to them.

A closed stream stays closed to us, instead of lending its number to the next file that is opened; a letter
that the terminal's encoding lacks is written as an escape; and what is printed on a terminal steers it only
where it is meant to, which is where it goes through a console of `asyncpp_cli.console`.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, TextIO, cast

from asyncpp_cli.errors import doing
from asyncpp_cli.plain_text import printable_lines

_NAMES = {0: "standard input", 1: "standard output", 2: "standard error"}


class _NamedFile(io.FileIO):
    """A stream that says which it is, should the system refuse to write."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self._number = number

    def write(self, content: object) -> int | None:  # type: ignore[override]
        with doing("written", _NAMES[self._number]):
            return super().write(content)  # type: ignore[arg-type]


class Stream(io.TextIOWrapper):
    """Standard output or error. On a terminal, what is written to it has no control characters."""

    def write(self, text: str) -> int:
        return super().write(printable_lines(text) if self.isatty() else text)


class _Steering:
    """A `Stream` for those who steer the terminal: with colours, with bars."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def steering(stream: TextIO) -> TextIO:
    """The same stream, which lets through what steers a terminal. Texts of others must not hold any of it."""
    return cast(TextIO, _Steering(stream)) if isinstance(stream, Stream) else stream


def make_fit() -> None:
    """Replace the process's standard output and error by a `Stream` each, where they are the system's own."""
    for number in _NAMES:
        _fill(number)
    for number, name in ((1, "stdout"), (2, "stderr")):
        present, own = getattr(sys, name), getattr(sys, f"__{name}__")
        if isinstance(present, Stream) or present is not own:
            continue  # made fit already, or somebody keeps what is printed
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
    """Open a stream that is closed, so that no file gets its number. Writing results is still refused."""
    try:
        os.fstat(number)
    except OSError:
        # Remarks are lost with the stream; that results are lost must be known.
        opened = os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)


def abandon_output() -> None:
    """Drop what standard output still holds and cannot write; the interpreter would try again at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(null, sys.stdout.fileno())
    os.close(null)
