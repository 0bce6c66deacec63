"""Starting attempts on this machine through submitit's local executor, one task per rank."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncpp_cli.errors import UserError
from asyncpp_cli.launch.import_path import import_path
from asyncpp_cli.launch.resources import Resources
from asyncpp_cli.runs.attempts.attempt import Attempt

_TIME_LIMIT_MINUTES = 60 * 24 * 365
"""submitit wants a time limit for local jobs; this one is never reached."""


class LocalJobs:
    """Starts attempts on this machine, and tells when their jobs have ended."""

    def __init__(self) -> None:
        self._jobs: dict[str, Any] = {}

    def start(self, attempt: Attempt, *, resources: Resources, devices: tuple[str, ...]) -> None:
        """Start all ranks of an attempt that this process has claimed.

        Args:
            attempt: the attempt.
            resources: its resources.
            devices: GPUs that its processes use, or none.
        """
        from submitit import LocalExecutor

        from asyncpp_cli.launch.local.submitit_rank import run_rank

        executor = LocalExecutor(folder=attempt.run.jobs)
        executor.update_parameters(
            tasks_per_node=resources.processes, timeout_min=_TIME_LIMIT_MINUTES, gpus_per_node=0
        )
        # The job inherits the blocked signals: Ctrl-C, or closing the terminal, reaches only the launcher.
        signals = {signal.SIGINT, signal.SIGHUP}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            with _import_path(), _stderr_to(attempt.startup_log):
                job = executor.submit(
                    run_rank, str(attempt.run.folder.absolute()), str(attempt.number), ",".join(devices)
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._jobs[attempt.run.id] = job

    def finish(self, *, seconds: float) -> None:
        """Wait for the jobs of ended ranks to end as well, at most this long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not all(job.done() for job in self._jobs.values()):
            time.sleep(0.05)

    def has_ended(self, attempt: Attempt) -> bool:
        """Whether the attempt's job has ended, so that it starts no more ranks."""
        job = self._jobs.get(attempt.run.id)
        return job is None or bool(job.done())


@contextmanager
def _import_path() -> Iterator[None]:
    """Processes started in this block import asyncpp from where this process does.

    `python -m` would look in the working folder first, where the user may have a package `optimizers`.
    """
    from submitit.core.utils import environment_variables

    root = str(Path(__file__).parents[3])
    with environment_variables(PYTHONSAFEPATH="1", PYTHONPATH=import_path(root)):
        yield


@contextmanager
def _stderr_to(file: Path) -> Iterator[None]:
    """Processes started in this block write their standard error to the file.

    If submitit's process cannot start the ranks, its traceback goes there instead of to the terminal.
    """
    stderr = os.dup(2)
    try:
        with file.open("ab") as errors:
            sys.stderr.flush()
            os.dup2(errors.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def check_folder_name(folder: Path) -> None:
    """Refuse a folder whose path contains one of submitit's patterns.

    Raises:
        UserError: the path contains %j, %t, %A or %a.
    """
    path = str(folder.absolute())
    for pattern in ("%j", "%t", "%A", "%a"):
        if pattern in path:
            raise UserError(f"{path}: submitit would expand {pattern} in the path; rename the folder")


def command_of(run_folder: Path, *, replay: bool) -> str:
    """The command that each process of a run executes, quoted for a shell."""
    words = [sys.executable, "-m", "asyncpp_cli", "train", str(run_folder), *(["--replay"] if replay else [])]
    return shlex.join(words)
