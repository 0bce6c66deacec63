"""Progress of runs on standard error: a line for each that starts or ends, and where those that train stand:
in a bar on a terminal, elsewhere in a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from rich.progress import Progress
from rich.text import Text

from asyncpp_cli.base.console import console, duration, printable, say
from asyncpp_cli.base.progress import progress_bar
from asyncpp_cli.launch.common.options import Pauses
from asyncpp_cli.launch.local_machine import ShowProgress
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status, is_done

_TRUST_SECONDS = 20.0
"""Seconds after which a launch's own pace counts as much as the expected one."""
_LINE_SECONDS = 30.0
"""Seconds between two lines on the runs that train, where there is no terminal."""
_MOST_NAMED = 2
"""Runs that such a line names."""

Remark = Callable[[Sequence[tuple[Run, Status]]], str]
"""What is to be said once about the statuses of all runs; empty: nothing yet."""


@contextmanager
def shown_progress(display: Display, *, quiet: bool = False) -> Iterator[ShowProgress]:
    """The display on standard error: with a bar of all runs on a terminal, lines alone otherwise; nothing at
    all if `quiet`."""
    if quiet:
        yield lambda statuses: None
        return
    with progress_bar(console(errors=True)) if sys.stderr.isatty() else nullcontext() as bar:
        yield replace(display, bar=bar).update


def _most_steps(statuses: Sequence[tuple[Run, Status]]) -> int:
    return max((status.steps for _, status in statuses), default=0) or 1


def _share(status: Status, most: int) -> float:
    """Share of a run that is done, in 0..1; `most`: steps of one that has not begun, and has no count."""
    return 1.0 if is_done(status, until=status.steps) else min(1.0, status.step / (status.steps or most))


def _ended_line(run: Run, status: Status) -> str:
    if not is_done(status, until=status.steps):
        return f"{status.state:<12} {run.id}: {status.reason}"
    within = f" in {duration(status.seconds)}" if status.seconds is not None else ""
    loss = f", training loss {status.train_loss:.3f}" if status.train_loss is not None else ""
    rate = f", {status.tokens_per_second:,.0f} tokens/s" if status.tokens_per_second else ""
    return f"{status.state:<12} {run.id}: {status.steps} steps{within}{loss}{rate}"


def _standing(statuses: Sequence[tuple[Run, Status]]) -> str:
    """Where the runs that train stand: step and training loss of the first ones; empty if none trains."""
    training = [(run, status) for run, status in statuses if status.state == State.RUNNING and status.steps]
    named = [
        f"{run.id}: step {status.step} of {status.steps}"
        + (f", loss {status.train_loss:.3f}" if status.train_loss is not None else "")
        for run, status in training[:_MOST_NAMED]
    ]
    more = len(training) - len(named)
    return "; ".join([*named, *([f"{more} more"] if more else [])])


@dataclass(kw_only=True, eq=False)
class Display:
    """Prints a line for each run that starts or ends; shows the others in the bar."""

    bar: Progress | None = None
    done_before: int = 0
    """Number of completed runs that are not among those shown."""
    pauses: Pauses = field(default_factory=dict)
    """Steps after which runs pause; progress is shown towards these."""
    expected: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each run by id, if they are known of all."""
    remark: Remark | None = None
    """Said once, when it is not empty."""

    def __post_init__(self) -> None:
        self._spoke = time.monotonic()
        self._states: dict[str, tuple[State, int]] = {}
        self._first: tuple[float, float] | None = None
        if self.bar is not None:
            self._task = self.bar.add_task("")

    def update(self, statuses: Sequence[tuple[Run, Status]], *, now: float | None = None) -> None:
        """Show how the runs stand; `now`: seconds of the monotonic clock."""
        now = time.monotonic() if now is None else now
        towards = [(run, self._towards_pause(run, status)) for run, status in statuses]
        done = self.done_before + sum(is_done(status, until=status.steps) for _, status in towards)
        count = self.done_before + len(towards)
        left = self.remaining(towards, now=now)
        total = f"{done} of {count} done" + (f", about {duration(left)} remaining" if left else "")
        for run, status in towards:
            if (line := self._event(run, status)) is not None:
                ended = self.bar is None and len(towards) > 1 and status.state != State.RUNNING
                self._say(f"{line} ({total})" if ended else line)
                self._spoke = now
        if self.remark is not None and (text := self.remark(statuses)):
            self._say(text)
            self.remark = None
        standing = _standing(towards)
        if self.bar is None:
            if standing and now - self._spoke >= _LINE_SECONDS:
                self._say(f"training     {standing} ({total})")
                self._spoke = now
        else:
            most = _most_steps(towards)
            shares = self.done_before + sum(_share(status, most) for _, status in towards)
            description = "\n".join(filter(None, (total, standing)))
            self.bar.update(self._task, description=description, completed=shares, total=count)

    def remaining(self, statuses: Sequence[tuple[Run, Status]], *, now: float) -> float | None:
        """Seconds until all have ended; None if unknown.

        By the expected seconds of each run, or else assuming equal time per step; and by how fast they have
        been so far, which in the first minute says little beside what is expected.
        """
        if not any(status.steps for _, status in statuses):
            return None
        most = _most_steps(statuses)
        work = {run.id: self.expected.get(run.id, status.steps or most) for run, status in statuses}
        done = sum(work[run.id] * _share(status, most) for run, status in statuses)
        if self._first is None:
            self._first = now, done
        since, before = self._first
        trust = _TRUST_SECONDS if self.expected else 0.0
        if done - before + trust <= 0 or now - since + trust <= 0:
            return None
        return (now - since + trust) / (done - before + trust) * (sum(work.values()) - done)

    def _event(self, run: Run, status: Status) -> str | None:
        """A line if the run has started or ended since the last update; else None."""
        known, now = self._states.get(run.id), (status.state, status.attempt)
        self._states[run.id] = now
        if known == now:
            return None
        if status.state == State.RUNNING:
            how = "started      " if known is not None else f"running      (on {status.host}) "
            return f"{how}{run.id}"
        return _ended_line(run, status) if known is not None else None

    def _towards_pause(self, run: Run, status: Status) -> Status:
        """The status with the step at which the run pauses as its last one."""
        return replace(status, steps=min(self.pauses.get(run.id, status.steps), status.steps))

    def _say(self, line: str) -> None:
        if self.bar is None:
            say(line)
        else:
            self.bar.console.print(Text(printable(line)))
