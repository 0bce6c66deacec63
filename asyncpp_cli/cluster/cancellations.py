"""Which runs were cancelled while a launch was open: it starts none of them that it has not begun.

EXPERIMENT/cancelled.jsonl   append-only: each `asyncpp cancel`, with the ids of its runs
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection

from asyncpp_cli.cluster.processes import user_name
from asyncpp_cli.runs import Experiment

_FILE = "cancelled.jsonl"


def record(experiment: Experiment, ids: Collection[str]) -> None:
    """Say that runs are cancelled, before any of them is ended."""
    entry = {"time": time.time(), "by": user_name(), "runs": sorted(ids)}
    descriptor = os.open(experiment.folder / _FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, (json.dumps(entry) + "\n").encode())
    finally:
        os.close(descriptor)


class Cancellations:
    """Those of an experiment from now on: by their place in the file, not by anybody's clock."""

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
