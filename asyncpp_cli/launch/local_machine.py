"""Running an experiment's runs on this machine: starts them as resources become free, and watches them.

Runs are claimed one by one under their locks, so several launches of one experiment share the work, on any
number of machines that see its folder. The run of a machine that vanished is started again by another one.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from math import inf
from types import FrameType
from typing import Any

from asyncpp_cli.base.console import say
from asyncpp_cli.base.errors import FAILED, DamagedError, refusal_of
from asyncpp_cli.base.import_path import environment_of_program
from asyncpp_cli.experiment.run_data import config_to_train, naming_config
from asyncpp_cli.launch.common.options import NO_PAUSES, Pauses, check_pause
from asyncpp_cli.launch.common.supervisor import TAKEN_OVER
from asyncpp_cli.runs.attempts.attempt import Attempt, kill
from asyncpp_cli.runs.attempts.claims import claim
from asyncpp_cli.runs.attempts.files import RankEnd, Scheduler
from asyncpp_cli.runs.attempts.settle import Knowledge, current_status, override_outcome, settle
from asyncpp_cli.runs.processes import this_process
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import Cause, State, Status, is_done
from asyncpp_cli.sites.resources import Machine, Resources, resources_of
from schedules import ScheduleError
from stages.config.own_code import check_code
from stages.config.run_config import RunConfig
from stages.config.segments import as_data_ranks, is_sharded
from stages.resolve.data import check_data

_POLL_SECONDS = 0.25
_SECONDS_TO_END = 20.0
"""Extra time to shut down after saving."""


@dataclass(frozen=True)
class Task:
    """A run to launch, with its resources."""

    run: Run
    resources: Resources
    config: RunConfig
    until: int | None = None
    """Step after which to pause it; None: it trains to the end."""
    gpu_gb: float = 0.0
    """Memory that it is planned to take on the fullest of its GPUs, 10^9 bytes; infinite if not known, 0 if
    it shares none."""


class LocalJobs:
    """Starts attempts on this machine, and tells when their supervisors have ended."""

    def __init__(self) -> None:
        self._supervisors: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, attempt: Attempt, *, resources: Resources, devices: tuple[str, ...]) -> None:
        """Start all ranks of an attempt that this process has claimed.

        Args:
            attempt: the attempt.
            resources: its resources.
            devices: GPUs that its processes use, or none.
        """
        words = [str(attempt.run.folder.absolute()), str(attempt.number), str(resources.processes)]
        with attempt.startup_log.open("ab") as errors:
            self._supervisors[attempt.run.id] = subprocess.Popen(
                [sys.executable, "-m", "asyncpp_cli.launch.common.supervisor", *words, ",".join(devices)],
                env=environment_of_program(),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                # Ctrl-C, or closing the terminal, reaches only the launcher.
                start_new_session=True,
            )

    def finish(self, *, seconds: float) -> None:
        """Wait for the supervisors of ended ranks to end as well, at most this long."""
        deadline = time.monotonic() + seconds
        for supervisor in self._supervisors.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                supervisor.wait(max(0.0, deadline - time.monotonic()))

    def terminate(self, attempt: Attempt) -> None:
        """Tell the attempt's supervisor to end its ranks, which save."""
        if (supervisor := self._supervisors.get(attempt.run.id)) is not None:
            supervisor.terminate()

    def ended_with(self, attempt: Attempt) -> int | None:
        """Exit code of the attempt's supervisor, 0 without one; None: it may still start ranks."""
        supervisor = self._supervisors.get(attempt.run.id)
        return 0 if supervisor is None else supervisor.poll()


ShowProgress = Callable[[Sequence[tuple[Run, Status]]], None]
"""Shows the status of every run; called a few times per second."""


class Interrupted(Exception):  # noqa: N818 (not an error)
    """The launcher got SIGINT, SIGTERM or SIGHUP."""

    own = 0
    """Runs that it had started and ended."""
    others = 0
    """Runs that others had started, and that go on."""


@dataclass(eq=False)
class Launcher:
    """Runs tasks on this machine.

    Args:
        tasks: in the order in which to start them.
        machine: the resources that they share.
        max_parallel: number of runs at a time, which may share GPUs as far as their planned memory fits;
            None: as many as fit on separate cores and GPUs.
        replay: run each in one process.
        progress: shows how the runs stand.
        scheduler: asked about runs that are running in SLURM jobs.
        cancelled: ids of runs not to start; may grow during the launch.
    """

    tasks: Sequence[Task]
    _: KW_ONLY
    machine: Machine
    max_parallel: int | None
    replay: bool
    progress: ShowProgress
    scheduler: Scheduler | None = None
    cancelled: Container[str] = ()

    def __post_init__(self) -> None:
        self._jobs = LocalJobs()
        self._own: dict[str, tuple[Attempt, Task, tuple[str, ...]]] = {}
        self._host = this_process().host
        self._tried: set[str] = set()
        self._elsewhere: set[str] = set()
        """Ids of runs that run on another machine."""
        self._statuses: dict[str, Status] = {}
        self._told_of_waiting = False

    def run(self) -> list[Status]:
        """Run all tasks that are not completed, and wait for those that other launches are running.

        Returns:
            The final status of each task's run.

        Raises:
            Interrupted: by SIGINT, SIGTERM or SIGHUP, after the runs started here have been ended.
        """
        with _signals_raise():
            try:
                statuses = self._update(pending=True)
                while self._any_going_on(statuses):
                    # Before starting a run, see what other launches have started meanwhile.
                    if self._next(statuses) and (task := self._next(self._update(pending=True))):
                        self._start(task)
                    else:
                        time.sleep(_POLL_SECONDS)
                    statuses = self._update(pending=False)
                self._jobs.finish(seconds=_SECONDS_TO_END)
                return [status for _, status in statuses]
            except Interrupted as interrupted:
                interrupted.own = len(self._own)
                self._end_own(f"{interrupted} in asyncpp launch")
                interrupted.others = sum(_is_running(status) for _, status in self._update(pending=False))
                raise

    def _update(self, *, pending: bool) -> list[tuple[Run, Status]]:
        """The status of every task's run; pending runs are read again only with `pending`.

        Reading a thousand statuses takes time from the runs that train.
        """
        for task in self.tasks:
            known = self._statuses.get(task.run.id)
            if known is None or _is_running(known) or (pending and not is_done(known, until=task.until)):
                self._statuses[task.run.id] = self._status(task.run)
        statuses = [(task.run, self._statuses[task.run.id]) for task in self.tasks]
        for run, status in statuses:
            if run.id in self._own and not self._is_own(status, run):
                self._give_up(run, status)
            if status.state == State.RUNNING and run.id not in self._own:
                # Another launch runs it, and starts it again should it fail.
                self._tried.add(run.id)
                if status.host not in ("", self._host):
                    self._elsewhere.add(run.id)
            elif run.id in self._elsewhere:
                self._elsewhere.discard(run.id)
                if status.cause == Cause.KILLED and not Attempt(run, status.attempt).ranks_with(RankEnd):
                    say(f"{run.id}: {status.host} has vanished; another machine may start it again")
                    self._tried.discard(run.id)
        self.progress(statuses)
        return statuses

    def _status(self, run: Run) -> Status:
        own = self._own.get(run.id)
        ended = own[0].number if own is not None and self._jobs.ended_with(own[0]) is not None else None
        return current_status(run, none_to_come=ended, scheduler=self.scheduler)

    def _is_own(self, status: Status, run: Run) -> bool:
        """Whether the attempt that this launcher started is still running; another may follow it at once."""
        return status.state == State.RUNNING and status.attempt == self._own[run.id][0].number

    def _give_up(self, run: Run, status: Status) -> None:
        """Forget an own attempt that is over; until its processes have ended, their GPUs are not free."""
        attempt, _, _ = self._own[run.id]
        if status.attempt > attempt.number:
            if (code := self._jobs.ended_with(attempt)) is None:
                return
            if code == TAKEN_OVER:
                say(
                    f"{run.id}: this machine was silent for longer than site.lease; attempt {status.attempt} "
                    f"on {status.host} has taken it over"
                )
        del self._own[run.id]

    def _next(self, statuses: Sequence[tuple[Run, Status]]) -> Task | None:
        """The next task to start, if resources for it are free."""
        pairs = list(zip(self.tasks, statuses, strict=True))
        running = [task for task, (_, status) in pairs if _is_running(status) and status.host == self._host]
        for task, (run, status) in pairs:
            if not (_is_running(status) or is_done(status, until=task.until) or run.id in self._tried):
                if run.id in self.cancelled:
                    self._tried.add(run.id)
                    continue
                return task if self._fits(task, running) else None
        return None

    def _start(self, task: Task) -> None:
        run = task.run
        self._tried.add(run.id)
        others = len(self._own)
        attempt = None
        try:
            attempt = claim(
                run,
                processes=task.resources.processes,
                replay=self.replay,
                steps=task.config.train.steps,
                gpus=task.resources.gpus,
                threads=task.resources.threads,
                until=task.until,
            )
            if attempt is not None and run.id in self.cancelled:
                # Cancelled between the check and the claim; `cancel` waits for this.
                attempt.stop("cancelled as it began", cause=Cause.CANCELLED)
                settle(run, Knowledge(all_over=attempt.number))
            elif attempt is not None:
                devices = self._gpus_for(task)
                self._own[run.id] = (attempt, task, devices)
                self._jobs.start(attempt, resources=task.resources, devices=devices)
        except (DamagedError, OSError, RuntimeError) as error:
            refusal = refusal_of(error)
            if refusal is None:
                raise
            self._record_not_started(run, attempt, refusal.message)
            if refusal.code == FAILED or getattr(error, "errno", None) == errno.EROFS:
                self._reduce_parallelism(run, others)
        del self._statuses[run.id]

    def _record_not_started(self, run: Run, attempt: Attempt | None, message: str) -> None:
        """Report and record that a run could not be started."""
        self._own.pop(run.id, None)
        reason = f"could not be started: {message}"
        say(f"{run.id} {reason}")
        if attempt is not None:
            with contextlib.suppress(OSError, DamagedError):
                override_outcome(attempt, state=State.INTERRUPTED, cause=Cause.ERROR, reason=reason)

    def _reduce_parallelism(self, run: Run, others: int) -> None:
        """Limit the runs at a time to those that run now, since the machine is out of some resource."""
        if others == 0:
            # None of our runs will free it. Runs of other launches are still watched.
            self._tried |= {task.run.id for task in self.tasks}
            return
        self.max_parallel = min(others, self.max_parallel or others)
        self._tried.discard(run.id)

    def _fits(self, task: Task, running: Sequence[Task]) -> bool:
        wanted = task.resources
        if not running:
            return True
        if self.max_parallel is not None and len(running) >= self.max_parallel:
            return False
        if wanted.gpus > len(self._gpus_for(task)):
            self._tell_of_waiting(task)
            return False
        if wanted.gpus or self.max_parallel is not None:
            return True
        return sum(other.resources.cores for other in running) + wanted.cores <= self.machine.cores

    def _gpus_for(self, task: Task) -> tuple[str, ...]:
        """GPUs for a run, those with fewest runs first; fewer than it needs where others are taken."""
        runs: Counter[str] = Counter()
        gb: Counter[str] = Counter()
        most: dict[str, int | None] = dict.fromkeys(self.machine.gpus, task.config.site.runs_per_gpu)
        for _, other, devices in self._own.values():
            runs.update(devices)
            gb.update(dict.fromkeys(devices, other.gpu_gb))
            for device in devices:
                most[device] = min(filter(None, (most[device], other.config.site.runs_per_gpu)), default=None)
        room = inf if self.machine.gpu_gb is None else self.machine.gpu_gb - task.gpu_gb

        def may_share(device: str) -> bool:
            if (limit := most[device]) is not None:
                return runs[device] < limit
            return self.max_parallel is not None and gb[device] <= room

        free = [device for device in self.machine.gpus if not runs[device] or may_share(device)]
        return tuple(sorted(free, key=lambda device: runs[device])[: task.resources.gpus])

    def _tell_of_waiting(self, task: Task) -> None:
        if self._told_of_waiting:
            return
        self._told_of_waiting = True
        if (most := task.config.site.runs_per_gpu) is not None:
            say(f"Runs wait for a free GPU: site.runs_per_gpu is {most}")
        elif self.max_parallel is None:
            say("Runs wait for a free GPU: --max-parallel N trains N at a time, several on a GPU")
        else:
            gb = "memory that is not known" if task.gpu_gb == inf else f"{task.gpu_gb:.1f} GB"
            say(
                f"Fewer than {self.max_parallel} runs at a time: {task.run.id} is planned to take {gb} "
                f"beside those that train, of the GPU's {self.machine.gpu_gb:.1f} GB"
            )

    def _any_going_on(self, statuses: Sequence[tuple[Run, Status]]) -> bool:
        return any(
            _is_running(status) or not (is_done(status, until=task.until) or run.id in self._tried)
            for task, (run, status) in zip(self.tasks, statuses, strict=True)
        )

    def _end_own(self, reason: str) -> None:
        for attempt, _, _ in self._own.values():
            try:
                attempt.stop(reason)
            except OSError:  # a full disk
                self._jobs.terminate(attempt)
        longest = max((task.config.site.grace for _, task, _ in self._own.values()), default=0.0)
        deadline = time.monotonic() + longest + _SECONDS_TO_END
        while self._own and time.monotonic() < deadline:
            self._update(pending=False)
            time.sleep(_POLL_SECONDS)
        self._jobs.finish(seconds=1.0 if self._own else _SECONDS_TO_END)
        for attempt, _, _ in self._own.values():
            kill(attempt)


def _is_running(status: Status) -> bool:
    return status.state == State.RUNNING


def _planned_gb(config: RunConfig, resources: Resources) -> float:
    """Memory that a run is planned to take on its fullest GPU, 10^9 bytes, with a context per process."""
    from asyncpp_cli.planner.costs.devices import CONTEXT_GB
    from asyncpp_cli.planner.memory import GB, planned_memory
    from asyncpp_cli.planner.sharding import memory_of_run

    if config.model.factory is not None:
        return inf
    try:
        if is_sharded(config) and resources.processes == resources.ranks:
            ranks = [memory_of_run(config)]
        else:
            config = as_data_ranks(config)
            ranks = planned_memory(config)
    except ScheduleError:
        return inf
    if resources.processes < resources.ranks:
        # In replay one process holds them all, and has no communicators.
        tensors = sum(sum(kinds.values()) - kinds["communicators"] for kinds in ranks)
        of_process = tensors * config.parallel.data
    else:
        of_process = max(sum(kinds.values()) for kinds in ranks)
    return -(-resources.processes // resources.gpus) * (of_process / GB + CONTEXT_GB)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """In the block, the first SIGINT, SIGTERM or SIGHUP raises `Interrupted`; further ones are ignored."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    # Ignored signals stay ignored: nohup, or a shell running this in the background, ignores them.
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tasks_of(
    runs: Sequence[Run], *, replay: bool, machine: Machine, pauses: Pauses = NO_PAUSES
) -> tuple[list[Task], list[str]]:
    """The tasks to launch, and a message for each run whose configuration cannot be read.

    Raises:
        UserError: a run needs more than the machine has, cannot be paused there, or its data is missing or
            has changed.
    """
    seen: dict[str, Any] = {}
    tasks: list[Task] = []
    damaged: list[str] = []
    for run in runs:
        try:
            config = config_to_train(run)
            with naming_config(run):
                check_data(config, seen)
                check_code(config)
        except DamagedError as error:
            damaged.append(str(error))
            continue
        resources = resources_of(config, replay=replay, machine=machine)
        check_pause(run, config, pauses)
        may_share = resources.gpus and machine.gpu_gb is not None and len(runs) > 1
        gb = _planned_gb(config, resources) if may_share else 0.0
        until = pauses.get(run.id)
        tasks.append(Task(run, resources, config, until=until, gpu_gb=gb))
    return tasks, damaged
