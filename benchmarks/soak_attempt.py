"""One start of a run for `soak.py`: its processes, what they are doing, and their end."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from asyncpp_cli.runs.run_folder import Run

LONGEST_ATTEMPT = 200.0
"""Seconds."""

forkserver = multiprocessing.get_context("forkserver")


def train_as(folder: str, rank: int, size: int, number: int) -> None:
    """A process of an attempt: what `asyncpp train` does in the environment that torchrun gives it."""
    log = os.open(Path(folder) / "soak.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        TORCHELASTIC_RUN_ID=f"soak-{number}",
    )
    import typer

    from asyncpp_cli.commands.runs.train import train

    try:
        train(Path(folder), replay=size == 1)
    except typer.Exit as leaving:
        sys.exit(leaving.exit_code)


class Attempt:
    """One start of a run, in `size` processes."""

    def __init__(self, run: Run, *, size: int, number: int) -> None:
        self.run = run
        self.started = time.monotonic()
        self._left_over = set(self._unfinished())
        self._size_before = self._metrics_size()
        self.processes = [
            forkserver.Process(target=train_as, args=(str(run.folder), rank, size, number))
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def _metrics_size(self) -> int:
        return self.run.metrics_file.stat().st_size if self.run.metrics_file.exists() else 0

    @property
    def goes_on(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    @property
    def trains(self) -> bool:
        return self._metrics_size() > self._size_before

    def _unfinished(self) -> Iterator[tuple[str, int]]:
        """Checkpoints that are being written, or were when an earlier attempt was killed."""
        for folder in self.run.checkpoints.glob(".writing-*"):
            with suppress(FileNotFoundError):
                yield folder.name, folder.stat().st_ctime_ns

    @property
    def saves(self) -> bool:
        return any(folder not in self._left_over for folder in self._unfinished())

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait for something, or for the attempt's end."""
        while self.goes_on and not reached():
            if time.monotonic() - self.started > LONGEST_ATTEMPT:
                raise SystemExit(f"{self.run.folder} has come to a standstill")
            time.sleep(0.0005)

    def finish(self, *, seconds: float) -> int:
        """Wait for all processes to end; how many had to be made to."""
        deadline = time.monotonic() + seconds
        made = 0
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                made += 1
            process.join()
        return made
