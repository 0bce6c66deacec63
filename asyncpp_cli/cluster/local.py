"""This machine as a site: submitit's local executor, one task a rank."""

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

from asyncpp_cli.cluster.attempts import Attempt
from asyncpp_cli.cluster.resources import Resources
from asyncpp_cli.errors import UserError

_MINUTES_WITHOUT_END = 60 * 24 * 365
"""submitit ends a local job after a time limit; here there is none."""


class LocalSite:
    """Starts attempts on this machine and knows which of its jobs are still there."""

    def __init__(self) -> None:
        self._jobs: dict[str, Any] = {}

    def start(self, attempt: Attempt, *, resources: Resources, devices: tuple[str, ...]) -> None:
        """Start all ranks of an attempt that this process has claimed.

        Args:
            attempt: which.
            resources: what it takes.
            devices: GPUs that it may use, one a process, or none.
        """
        from submitit import LocalExecutor

        from asyncpp_cli.cluster.job import run_rank

        executor = LocalExecutor(folder=attempt.run.jobs)
        executor.update_parameters(
            tasks_per_node=resources.processes, timeout_min=_MINUTES_WITHOUT_END, gpus_per_node=0
        )
        # The job inherits what is blocked: a Ctrl-C in this terminal, or its closing, reaches only the
        # launcher, and that decides what becomes of the job.
        signals = {signal.SIGINT, signal.SIGHUP}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            with _our_packages_first(), _errors_into(attempt.starting):
                job = executor.submit(
                    run_rank, str(attempt.run.folder.absolute()), str(attempt.number), ",".join(devices)
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._jobs[attempt.run.id] = job

    def finish(self, *, seconds: float) -> None:
        """Wait for jobs whose ranks have all ended to be gone too, but not for long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not all(job.done() for job in self._jobs.values()):
            time.sleep(0.05)

    def has_ended(self, attempt: Attempt) -> bool:
        """Whether nothing of the job is left that could still start a rank."""
        job = self._jobs.get(attempt.run.id)
        return job is None or bool(job.done())


@contextmanager
def _our_packages_first() -> Iterator[None]:
    """Processes started in this block find our packages where this process does.

    `python -m` looks in the working folder first, where a user may have an `optimizers` of their own.
    """
    from submitit.core.utils import environment_variables

    root = str(Path(__file__).parents[2])
    before = os.environ.get("PYTHONPATH")
    with environment_variables(
        PYTHONSAFEPATH="1", PYTHONPATH=root if before is None else f"{root}{os.pathsep}{before}"
    ):
        yield


@contextmanager
def _errors_into(file: Path) -> Iterator[None]:
    """Processes started in this block write their errors into the file.

    submitit's own process starts the ranks. Where it cannot, its traceback is nothing for people's terminals.
    """
    kept = os.dup(2)
    try:
        with file.open("ab") as errors:
            sys.stderr.flush()
            os.dup2(errors.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def check_folder(folder: Path) -> None:
    """Refuse a folder whose name submitit would take for a pattern.

    Raises:
        UserError: it has %j, %t, %A or %a in it.
    """
    path = str(folder.absolute())
    for pattern in ("%j", "%t", "%A", "%a"):
        if pattern in path:
            raise UserError(
                f"{path}: {pattern} in a path means something else to submitit; rename the folder"
            )


def command_of(run_folder: Path, *, replay: bool) -> str:
    """The command that each process of a run executes, as one would type it."""
    words = [sys.executable, "-m", "asyncpp_cli", "train", str(run_folder), *(["--replay"] if replay else [])]
    return shlex.join(words)
