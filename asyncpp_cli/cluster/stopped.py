"""Processes of runs that SIGSTOP has stopped: whoever waits for such a run would wait without end."""

from __future__ import annotations

import contextlib
import signal
import time

from asyncpp_cli.cluster.attempts import Attempt
from asyncpp_cli.cluster.processes import ProcessId, end, is_gone, is_stopped
from asyncpp_cli.console import say
from asyncpp_cli.runs import Run, Status

_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_AFTER_TRAINING = 3.0
"""How long a supervisor may be stopped that has nothing left to watch."""
_TIMES_WOKEN = 5
"""How often it is told to continue before it is ended."""


class StoppedProcesses:
    """Wakes the stopped processes of runs on this machine, some time after the runs have gone silent."""

    def __init__(self) -> None:
        self._looked: dict[str, float] = {}
        self._since: dict[ProcessId, float] = {}
        self._woken: dict[ProcessId, int] = {}

    def look(self, run: Run, status: Status, *, silence: float) -> None:
        """Look after the processes of a run that is going on.

        Args:
            run: which.
            status: as it is.
            silence: seconds without a sign of life that are a standstill.
        """
        now = time.monotonic()
        if now - self._looked.get(run.id, 0.0) < _SECONDS_BETWEEN_LOOKS:
            return
        self._looked[run.id] = now
        attempt = Attempt(run, status.attempt)
        silent = time.time() - (status.updated or 0.0) > silence
        for rank in range(len(status.pids)):
            processes = attempt.processes(rank)
            for process in processes:
                if not is_stopped(process):
                    self._since.pop(process, None)
                elif process not in self._since:
                    self._since[process] = now
                    say(f"{run.id}: process {process.pid} of rank {rank} is stopped (SIGSTOP)")
                elif silent or (
                    now - self._since[process] > _SECONDS_AFTER_TRAINING
                    and all(is_gone(other) for other in processes if other != process)
                ):
                    self._wake(process, run)

    def _wake(self, process: ProcessId, run: Run) -> None:
        times = self._woken[process] = self._woken.get(process, 0) + 1
        number = signal.SIGCONT if times <= _TIMES_WOKEN else signal.SIGKILL
        say(f"{run.id}: process {process.pid} gets {number.name}, to end its standstill")
        with contextlib.suppress(PermissionError):
            end(process, number)
