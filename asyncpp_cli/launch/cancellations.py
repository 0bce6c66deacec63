"""Runs cancelled while a launch is open: it starts none of them.

EXPERIMENT/cancelled.jsonl   append-only: every `asyncpp cancel`, with its runs, withdrawn if it failed
"""

from __future__ import annotations

import time
from collections.abc import Collection

from asyncpp_cli.atomic_files import append_line
from asyncpp_cli.console import say
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.processes import user_name
from stages.records import DamagedError, Record, decoded, encoded

_FILE = "cancelled.jsonl"


class Cancellation(Record, frozen=True, kw_only=True):
    """A line of the file."""

    time: float
    """Seconds since 1970."""
    by: str
    """Name of the user."""
    runs: tuple[str, ...]
    """Ids of the runs."""
    withdrawn: bool = False
    """Whether an earlier cancellation of these runs has failed, and no longer holds."""


def record_cancellation(experiment: Experiment, ids: Collection[str], *, withdrawn: bool = False) -> None:
    """Record that runs are cancelled, before any of them is ended, or that this has failed."""
    entry = Cancellation(time=time.time(), by=user_name(), runs=tuple(sorted(ids)), withdrawn=withdrawn)
    append_line(experiment.folder / _FILE, encoded(entry).decode().rstrip())


class Cancellations:
    """Ids of the runs cancelled since this object was made, by file position rather than by clock.

    Each cancellation is announced when it is first seen.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._file = experiment.folder / _FILE
        self._read_to = self._size()
        self._ids: set[str] = set()

    def __contains__(self, run_id: object) -> bool:
        if self._size() > self._read_to:
            with self._file.open("rb") as file:
                file.seek(self._read_to)
                lines = file.read().splitlines(keepends=True)
            for line in lines:
                if line.endswith(b"\n"):
                    self._read_to += len(line)
                    self._apply(line)
        return run_id in self._ids

    def _apply(self, line: bytes) -> None:
        try:
            entry = decoded(line, Cancellation, where=f"a line of {self._file}")
        except DamagedError as error:
            say(f"{error}: it cancels nothing")
            return
        if entry.withdrawn:
            self._ids.difference_update(entry.runs)
            say(f"cancelling failed for {entry.by}: this launch starts the runs all the same")
        else:
            self._ids.update(entry.runs)
            runs = "1 run" if len(entry.runs) == 1 else f"{len(entry.runs)} runs"
            say(f"{entry.by} cancelled {runs}: this launch does not start them")

    def _size(self) -> int:
        try:
            return self._file.stat().st_size
        except FileNotFoundError:
            return 0
