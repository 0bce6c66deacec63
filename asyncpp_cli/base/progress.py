"""A progress bar on standard error, if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from asyncpp_cli.base.console import console, printable

_QUIET_SECONDS = 1.0
"""What takes less time needs no bar."""


def progress_bar(terminal: Console, *further: ProgressColumn) -> Progress:
    """A bar with the task's description, and with further columns at its end.

    It disappears in the end. Remarks appear above it; results must be printed before or after.
    """
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TaskProgressColumn("{task.percentage:.0f}%"),
        *further,
        console=terminal,
        transient=True,
        expand=True,
        redirect_stdout=False,
    )


@contextmanager
def shown(what: str, *, total: float | None = None) -> Iterator[Callable[[float], None]]:
    """Show a bar for as long as the context lasts, but not for its first second.

    Args:
        what: is being done.
        total: amount of work; None if unknown, then the bar only shows that something happens.

    Yields:
        A function that adds to the amount that is done.
    """
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    bar = progress_bar(console(errors=True), TimeElapsedColumn())
    task = bar.add_task(printable(what), total=total)
    start = Timer(_QUIET_SECONDS, bar.start)
    start.start()
    try:
        yield lambda done: bar.advance(task, done)
    finally:
        start.cancel()
        start.join()
        if bar.live.is_started:
            bar.stop()
