"""Showing the progress of runs on standard error: bars on a terminal, lines otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from asyncpp_cli.console import console, duration, say
from asyncpp_cli.launch import local_machine as launcher
from asyncpp_cli.launch.options import NO_PAUSES, Pauses
from asyncpp_cli.plain_text import printable
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status, is_done
from asyncpp_cli.tables import shortened

_SECONDS_BETWEEN_LINES = 15.0

_WIDE = 110
"""Width of a terminal, in columns, from which throughput is shown beside loss and time."""
_BESIDE_NAME = 50
"""Columns that bar, steps, loss and time take."""
_SHORTEST_NAME = 20


@contextmanager
def shown_progress(*, done_before: int = 0, pauses: Pauses = NO_PAUSES) -> Iterator[launcher.ProgressDisplay]:
    """The display that fits standard error.

    Args:
        done_before: number of completed runs that are not among those shown.
        pauses: steps after which runs pause; progress is shown towards these.
    """
    if sys.stderr.isatty():
        with _progress_bars(console(errors=True)) as bars:
            yield _TowardsPauses(_BarDisplay(bars, done_before=done_before), pauses)
    else:
        yield _TowardsPauses(_LineDisplay(done_before=done_before), pauses)


class _TowardsPauses:
    """Shows each run with the step at which it pauses as its last one."""

    def __init__(self, display: launcher.ProgressDisplay, pauses: Pauses) -> None:
        self._display = display
        self._pauses = pauses

    def update(self, statuses: Sequence[tuple[Run, Status]]) -> None:
        self._display.update([(run, self._towards(run, status)) for run, status in statuses])

    def _towards(self, run: Run, status: Status) -> Status:
        until = self._pauses.get(run.id, status.steps)
        return replace(status, steps=min(until, status.steps))


class _Events:
    """Finds out which runs have started or ended since the last update, and the time the others need."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[State, int]] = {}
        self._first: dict[str, tuple[float, int]] = {}

    def line(self, run: Run, status: Status) -> str | None:
        """A line if the run has started or ended since the last call; else None."""
        known = self._states.get(run.id)
        now = (status.state, status.attempt)
        self._states[run.id] = now
        if known == now:
            return None
        if status.state == State.RUNNING:
            self._first.pop(run.id, None)
            how = "started      " if known is not None else f"running      (on {status.host}) "
            return f"{how}{run.id}"
        return _ended_line(run, status) if known is not None else None

    def remaining(self, run: Run, status: Status) -> float | None:
        """Seconds until the run ends, at its pace so far; None if unknown."""
        now = status.updated or time.time()
        since, step = self._first.setdefault(run.id, (now, status.step))
        if status.step == step or status.step == 0:
            return None
        return (now - since) / (status.step - step) * (status.steps - status.step)


class _Total:
    """Progress of all runs together."""

    def __init__(self, *, done_before: int) -> None:
        self._done_before = done_before
        self._first: tuple[float, float] | None = None

    def line(self, statuses: Sequence[tuple[Run, Status]]) -> str:
        """`12 of 18 done, about 1:23 remaining`; without the time if it is unknown."""
        done, count = self.counts([status for _, status in statuses])
        left = self.remaining([status for _, status in statuses])
        about = f", about {duration(left)} remaining" if left is not None else ""
        return f"{done} of {count} done{about}"

    def counts(self, statuses: Sequence[Status]) -> tuple[int, int]:
        """Number of runs that are done, and of all."""
        done = sum(is_done(status, until=status.steps) for status in statuses)
        return self._done_before + done, self._done_before + len(statuses)

    def remaining(self, statuses: Sequence[Status], *, now: float | None = None) -> float | None:
        """Seconds until all have ended, assuming equal time per step; None if unknown."""
        now = time.monotonic() if now is None else now
        steps = max((status.steps for status in statuses), default=0)
        if not steps:
            return None
        # A run that has not begun has no step count.
        done = sum(
            1.0 if is_done(status, until=status.steps) else min(1.0, status.step / (status.steps or steps))
            for status in statuses
        )
        if self._first is None:
            self._first = now, done
        since, before = self._first
        if done <= before or now <= since:
            return None
        return (now - since) / (done - before) * (len(statuses) - done)


def _ended_line(run: Run, status: Status) -> str:
    if not is_done(status, until=status.steps):
        return f"{status.state:<12} {run.id}: {status.reason}"
    seconds = (status.ended or 0.0) - (status.started or 0.0)
    return f"{status.state:<12} {run.id}: {status.steps} steps in {duration(seconds)}{_figures(status)}"


def _figures(status: Status) -> str:
    loss = f", training loss {status.train_loss:.3f}" if status.train_loss is not None else ""
    rate = f", {status.tokens_per_second:,.0f} tokens/s" if status.tokens_per_second else ""
    return loss + rate


class _LineDisplay:
    def __init__(self, *, done_before: int) -> None:
        self._events = _Events()
        self._total = _Total(done_before=done_before)
        self._last = time.monotonic()

    def update(self, statuses: Sequence[tuple[Run, Status]]) -> None:
        for run, status in statuses:
            if (line := self._events.line(run, status)) is not None:
                say(line)
        if time.monotonic() - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = time.monotonic()
        for run, status in statuses:
            if status.state == State.RUNNING:
                remaining = self._events.remaining(run, status)
                left = f", {duration(remaining)} remaining" if remaining is not None else ""
                say(f"running      {run.id}: step {status.step} of {status.steps}{_figures(status)}{left}")
        if self._total.counts([])[1] + len(statuses) > 1:
            say(self._total.line(statuses))


def _progress_bars(terminal: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
        console=terminal,
        expand=True,
        transient=True,
    )


class _BarDisplay:
    def __init__(self, progress: Progress, *, done_before: int) -> None:
        self._progress = progress
        self._events = _Events()
        self._total = _Total(done_before=done_before)
        self._bars: dict[str, TaskID] = {}
        self._all = progress.add_task("runs", figures="", total=0)

    def update(self, statuses: Sequence[tuple[Run, Status]]) -> None:
        for run, status in statuses:
            line = self._events.line(run, status)
            if line is not None and status.state != State.RUNNING:
                self._progress.console.print(Text(printable(line)))
            if status.state == State.RUNNING:
                self._show(run, status)
            elif run.id in self._bars:
                self._progress.remove_task(self._bars.pop(run.id))
        done, count = self._total.counts([status for _, status in statuses])
        left = self._total.remaining([status for _, status in statuses])
        self._progress.update(
            self._all,
            description=f"{done} of {count} runs done",
            completed=done,
            total=count,
            figures=f"about {duration(left)} left" if left is not None else "",
        )

    def _show(self, run: Run, status: Status) -> None:
        if run.id not in self._bars:
            name = shortened(run.id, max(_SHORTEST_NAME, self._progress.console.width - _BESIDE_NAME))
            self._bars[run.id] = self._progress.add_task(name, figures="starting", total=status.steps)
        remaining = self._events.remaining(run, status)
        figures = []
        if status.step and self._progress.console.width >= _WIDE:
            figures.append(_figures(status).removeprefix(", "))
        elif status.step and status.train_loss is not None:
            figures.append(f"loss {status.train_loss:.3f}")
        if remaining is not None:
            figures.append(f"{duration(remaining)} left")
        self._progress.update(
            self._bars[run.id], completed=status.step, figures=", ".join(figures) or "starting"
        )
