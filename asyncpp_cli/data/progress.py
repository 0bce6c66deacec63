"""Shows the progress of data preparation on standard error: a bar on a terminal, lines otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from asyncpp_cli.console import console, say
from asyncpp_cli.data.prepare import PrepareProgress
from asyncpp_cli.plain_text import printable

_SECONDS_BETWEEN_LINES = 15.0


@contextmanager
def shown_progress() -> Iterator[PrepareProgress]:
    """A progress bar if standard error is a terminal, else lines."""
    if sys.stderr.isatty():
        with _bars() as bars:
            yield _ProgressBar(bars)
    else:
        yield _ProgressLines()


class _ProgressLines:
    def __init__(self) -> None:
        self._size = self._read = self._tokens = 0
        self._last = time.monotonic()

    def say(self, message: str) -> None:
        say(message)

    def begin(self, size: int) -> None:
        self._size = size

    def done(self, read: int, tokens: int) -> None:
        self._read += read
        self._tokens += tokens
        if time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            say(f"{self._read / max(1, self._size):.0%} of the input read, {self._tokens:,} tokens")


def _bars() -> Bars:
    return Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
        TimeRemainingColumn(),
        console=console(errors=True),
        expand=True,
        transient=True,
    )


class _ProgressBar:
    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._task = bars.add_task("tokens", total=None, figures="")
        self._tokens = 0

    def say(self, message: str) -> None:
        self._bars.console.print(printable(message), markup=False)

    def begin(self, size: int) -> None:
        self._bars.update(self._task, total=size)

    def done(self, read: int, tokens: int) -> None:
        self._tokens += tokens
        self._bars.update(self._task, advance=read, figures=f"{self._tokens:,} tokens")
