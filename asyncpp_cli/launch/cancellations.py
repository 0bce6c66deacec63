"""Runs cancelled while a launch is open: it starts none of them.

EXPERIMENT/cancelled.jsonl   append-only: every `asyncpp cancel`, with the ids of its runs
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection

from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.processes import user_name

_FILE = "cancelled.jsonl"


def record_cancellation(experiment: Experiment, ids: Collection[str]) -> None:
    """Record that runs are cancelled; called before any of them is ended."""
    entry = {"time": time.time(), "by": user_name(), "runs": sorted(ids)}
    descriptor = os.open(experiment.folder / _FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, (json.dumps(entry) + "\n").encode())
    finally:
        os.close(descriptor)


class Cancellations:
    """Ids of the runs cancelled since this object was made, by file position rather than by clock."""

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
                    self._ids.update(json.loads(line)["runs"])
        return run_id in self._ids

    def _size(self) -> int:
        try:
            return self._file.stat().st_size
        except FileNotFoundError:
            return 0
