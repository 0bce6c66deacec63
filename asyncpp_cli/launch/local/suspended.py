"""Resuming processes that SIGSTOP has stopped, since a launch would wait for their runs forever."""

from __future__ import annotations

import contextlib
import signal
import time

from asyncpp_cli.console import say
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.processes import ProcessId, is_gone, is_suspended, send_signal
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import Status

_SECONDS_BETWEEN_CHECKS = 1.0
_SECONDS_AFTER_TRAINING = 3.0
"""Time that a supervisor may stay stopped after its trainer has ended."""
_MAX_RESUMES = 5
"""Number of SIGCONTs before SIGKILL."""


class SuspendedProcesses:
    """Resumes the stopped processes of local runs once the runs have been silent for a while."""

    def __init__(self) -> None:
        self._checked: dict[str, float] = {}
        self._stopped_since: dict[ProcessId, float] = {}
        self._resumed: dict[ProcessId, int] = {}

    def check(self, run: Run, status: Status, *, silence: float) -> None:
        """Check the processes of a running run.

        Args:
            run: the run.
            status: its status.
            silence: seconds without a heartbeat after which the run counts as stalled.
        """
        now = time.monotonic()
        if now - self._checked.get(run.id, 0.0) < _SECONDS_BETWEEN_CHECKS:
            return
        self._checked[run.id] = now
        attempt = Attempt(run, status.attempt)
        silent = time.time() - (status.updated or 0.0) > silence
        for rank in range(len(status.pids)):
            processes = attempt.processes(rank)
            for process in processes:
                if not is_suspended(process):
                    self._stopped_since.pop(process, None)
                elif process not in self._stopped_since:
                    self._stopped_since[process] = now
                    say(f"{run.id}: process {process.pid} of rank {rank} is stopped (SIGSTOP)")
                elif silent or (
                    now - self._stopped_since[process] > _SECONDS_AFTER_TRAINING
                    and all(is_gone(other) for other in processes if other != process)
                ):
                    self._resume(process, run)

    def _resume(self, process: ProcessId, run: Run) -> None:
        times = self._resumed[process] = self._resumed.get(process, 0) + 1
        number = signal.SIGCONT if times <= _MAX_RESUMES else signal.SIGKILL
        say(f"{run.id}: process {process.pid} gets {number.name} because its run is stalled")
        with contextlib.suppress(PermissionError):
            send_signal(process, number)
