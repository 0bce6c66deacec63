"""Running an experiment's runs on this machine: start what is missing, watch, and leave nothing half done.

Whoever launches takes runs one by one, each under its lock, so two launches of one experiment share the work.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from asyncpp_cli.cluster.attempts import Attempt, look, settle, settle_again
from asyncpp_cli.cluster.claims import claim
from asyncpp_cli.cluster.jobs import Scheduler
from asyncpp_cli.cluster.local import LocalSite
from asyncpp_cli.cluster.processes import end
from asyncpp_cli.cluster.resources import Machine, Resources, resources_of
from asyncpp_cli.cluster.stopped import StoppedProcesses
from asyncpp_cli.console import say
from asyncpp_cli.errors import FAILED, DamagedError, UserError, refusal_of
from asyncpp_cli.run_data import config_to_train
from asyncpp_cli.runs import Cause, Run, State, Status
from stages.check import ConfigError, check_data

_SECONDS_BETWEEN_LOOKS = 0.25
_SECONDS_TO_END = 20.0
"""How long a run may take to be gone, beside what it may take to save."""


@dataclass(frozen=True)
class Task:
    """A run to launch, and what it takes."""

    run: Run
    resources: Resources
    steps: int
    wants_gpus: bool
    """It would use GPUs, one a process, if there are enough."""
    grace: float
    """Seconds that its ranks may take to save once they are told to end."""
    silence: float = 3600.0
    """Seconds without a sign of life that are a standstill."""


class Progress(Protocol):
    """Shows people how the runs go."""

    def update(self, statuses: Sequence[tuple[Run, Status]]) -> None:
        """Show the present state of every run; called a few times a second."""


class Interrupted(Exception):  # noqa: N818 (it is no error)
    """A person, or the system, told the launcher to end."""


class Launcher:
    """Runs tasks on this machine.

    Args:
        tasks: in the order in which they are to start.
        machine: what they share.
        max_parallel: runs at once; None: as many as have cores and GPUs of their own.
        replay: each run in one process.
        progress: is told how it goes.
        scheduler: is asked about runs that are going on in jobs of a cluster.
        cancelled: ids of runs that are not to be started any more; it may grow.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        machine: Machine,
        max_parallel: int | None,
        replay: bool,
        progress: Progress,
        scheduler: Scheduler | None = None,
        cancelled: Container[str] = (),
    ) -> None:
        self._scheduler = scheduler
        self._cancelled = cancelled
        self._tasks = tasks
        self._machine = machine
        self._max_parallel = max_parallel
        self._replay = replay
        self._progress = progress
        self._site = LocalSite()
        self._mine: dict[str, tuple[Attempt, Task, tuple[str, ...]]] = {}
        self._tried: set[str] = set()
        self._statuses: dict[str, Status] = {}
        self._stopped = StoppedProcesses()

    def run(self) -> list[Status]:
        """Run everything that is not completed, and wait for what others are running.

        Returns:
            The last status of each task's run.

        Raises:
            Interrupted: by SIGINT, SIGTERM or SIGHUP. The runs started here have been ended then.
        """
        with _signals_raise():
            try:
                statuses = self._look(everywhere=True)
                while self._any_going_on(statuses):
                    # Another launch may have started something since the last look.
                    if self._next(statuses) and (task := self._next(self._look(everywhere=True))):
                        self._start(task)
                    else:
                        time.sleep(_SECONDS_BETWEEN_LOOKS)
                    statuses = self._look(everywhere=False)
                self._site.finish(seconds=_SECONDS_TO_END)
                return [status for _, status in statuses]
            except Interrupted as interrupted:
                self._end_mine(f"{interrupted} in asyncpp launch")
                self._look(everywhere=False)
                raise

    def _look(self, *, everywhere: bool) -> list[tuple[Run, Status]]:
        """The status of every task's run; where not `everywhere`, of those that wait as last seen.

        Looking takes time from the runs that train, and there may be a thousand.
        """
        for task in self._tasks:
            known = self._statuses.get(task.run.id)
            if known is None or _is_running(known) or (everywhere and known.state != State.COMPLETED):
                self._statuses[task.run.id] = self._status(task.run)
        statuses = [(task.run, self._statuses[task.run.id]) for task in self._tasks]
        for task, (run, status) in zip(self._tasks, statuses, strict=True):
            if status.state == State.RUNNING:
                self._stopped.look(run, status, silence=task.silence)
            else:
                self._mine.pop(run.id, None)
            if status.state == State.RUNNING and run.id not in self._mine:
                # Somebody else runs it. Should it fail, it is theirs to start again.
                self._tried.add(run.id)
        self._progress.update(statuses)
        return statuses

    def _status(self, run: Run) -> Status:
        mine = self._mine.get(run.id)
        ended = mine is not None and self._site.has_ended(mine[0])
        return look(run, none_to_come=ended, scheduler=self._scheduler)

    def _next(self, statuses: Sequence[tuple[Run, Status]]) -> Task | None:
        """The next task to start, if one is left and there is room for it."""
        pairs = list(zip(self._tasks, statuses, strict=True))
        running = [task for task, (_, status) in pairs if _is_running(status)]
        for task, (run, status) in pairs:
            if status.state not in (State.RUNNING, State.COMPLETED) and run.id not in self._tried:
                if run.id in self._cancelled:
                    self._tried.add(run.id)
                    continue
                return task if self._has_room(task.resources, running) else None
        return None

    def _start(self, task: Task) -> None:
        run = task.run
        self._tried.add(run.id)
        others = len(self._mine)
        attempt = None
        try:
            attempt = claim(run, processes=task.resources.processes, replay=self._replay, steps=task.steps)
            if attempt is not None and run.id in self._cancelled:
                # Between the look and the claim. Who cancels looks after having said so, and waits for this.
                attempt.stop("cancelled as it began", cause=Cause.CANCELLED)
                settle(run, none_to_come=True, all_over=True)
            elif attempt is not None:
                devices = self._free_gpus()[: task.resources.gpus]
                self._mine[run.id] = (attempt, task, devices)
                self._site.start(attempt, resources=task.resources, devices=devices)
        except (DamagedError, OSError, RuntimeError) as error:
            refusal = refusal_of(error)
            if refusal is None:
                raise
            self._give_back(run, attempt, refusal.message)
            if refusal.code == FAILED or getattr(error, "errno", None) == errno.EROFS:
                self._run_short(run, others)
        del self._statuses[run.id]

    def _give_back(self, run: Run, attempt: Attempt | None, message: str) -> None:
        """Say of a run that it was not started; what went on before goes on."""
        self._mine.pop(run.id, None)
        reason = f"could not be started: {message}"
        say(f"{run.id} {reason}")
        if attempt is not None:
            with contextlib.suppress(OSError, DamagedError):
                settle_again(attempt, state=State.INTERRUPTED, cause=Cause.ERROR, reason=reason)

    def _run_short(self, run: Run, others: int) -> None:
        """Go on with no more runs at once than there is room for: the machine has run short of something."""
        if others == 0:
            # Nothing of ours will give it back. What others are running is still watched.
            self._tried |= {task.run.id for task in self._tasks}
            return
        self._max_parallel = min(others, self._max_parallel or others)
        self._tried.discard(run.id)

    def _has_room(self, wanted: Resources, running: Sequence[Task]) -> bool:
        if not running:
            return True
        if wanted.gpus > len(self._free_gpus()):
            return False
        if self._max_parallel is not None:
            return len(running) < self._max_parallel
        if wanted.gpus:
            return True
        return sum(task.resources.cores for task in running) + wanted.cores <= self._machine.cores

    def _free_gpus(self) -> tuple[str, ...]:
        taken = {device for _, _, devices in self._mine.values() for device in devices}
        return tuple(device for device in self._machine.gpus if device not in taken)

    def _any_going_on(self, statuses: Sequence[tuple[Run, Status]]) -> bool:
        return any(
            _is_running(status) or (status.state != State.COMPLETED and run.id not in self._tried)
            for run, status in statuses
        )

    def _end_mine(self, reason: str) -> None:
        for attempt, _, _ in self._mine.values():
            attempt.stop(reason)
        longest = max((task.grace for _, task, _ in self._mine.values()), default=0.0)
        deadline = time.monotonic() + longest + _SECONDS_TO_END
        while self._mine and time.monotonic() < deadline:
            self._look(everywhere=False)
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        self._site.finish(seconds=1.0 if self._mine else _SECONDS_TO_END)
        for attempt, task, _ in self._mine.values():
            for rank in range(task.resources.processes):
                for process in attempt.processes(rank):
                    end(process, signal.SIGKILL)


def _is_running(status: Status) -> bool:
    return status.state == State.RUNNING


@contextmanager
def _signals_raise() -> Iterator[None]:
    """In the block, the first signal to end raises `Interrupted`; further ones are ignored from then on."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    # What is ignored stays ignored: nohup, or a shell that put this into the background, wants it so.
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tasks_of(runs: Sequence[Run], *, replay: bool, machine: Machine) -> tuple[list[Task], list[str]]:
    """What there is to launch, and what is wrong with the runs whose configuration cannot be read.

    Raises:
        UserError: a run asks for what the machine lacks, or its data is not there or not what it was.
    """
    seen: dict[tuple[Any, ...], Any] = {}
    tasks: list[Task] = []
    damaged: list[str] = []
    for run in runs:
        try:
            config = config_to_train(run)
            check_data(config, seen)
        except DamagedError as error:
            damaged.append(str(error))
            continue
        except ConfigError as error:
            raise UserError(f"{run.config_file}: {error.key}: {error.message}") from error
        resources = resources_of(config, replay=replay, machine=machine)
        wants_gpus, grace = config.site.device != "cpu", config.site.grace
        tasks.append(
            Task(
                run,
                resources,
                config.train.steps,
                wants_gpus=wants_gpus,
                grace=grace,
                silence=2 * max(config.site.timeout, config.site.save_timeout),
            )
        )
    return tasks, damaged
