"""Where all processes of a run meet: once when it starts, and at every drain."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from stages.comm.json_data import to_json
from stages.comm.process import Process
from stages.comm.rendezvous.authenticated import Json
from stages.pipeline.timeline import Meeting


class DrainMeetings:
    """The meetings of one process.

    Args:
        process: of this rank; None: there is one process, which meets nobody.
        writing_process: number of the process that writes the run's rows.
    """

    def __init__(self, process: Process | None, *, writing_process: int) -> None:
        self._process = process
        self._writing_process = writing_process
        self.latest = Meeting(host=socket.gethostname(), left=time.perf_counter())
        """When this process left the latest meeting."""

    def first(self, *values: Json) -> list[Json]:
        """For each of several values, the first process's that is not None. All processes meet."""
        if self._process is None:
            return list(values)
        first = self._process.meetings.first(*values)
        self._leave()
        return first

    def at_writer(self, items: Sequence[object], *, starting: bool = False) -> list[Json] | None:
        """The items of all processes, as JSON, in the process that writes rows; None elsewhere. All meet.

        Args:
            items: of this process.
            starting: whether others may still be starting.
        """
        if self._process is None:
            return [to_json(item) for item in items]
        seconds = self._process.start_timeout.total_seconds() if starting else None
        everyone = self._process.meetings.gather(
            [to_json(item) for item in items], to=self._writing_process, seconds=seconds
        )
        self._leave()
        return [item for of_process in everyone for item in of_process] if everyone else None

    def _leave(self) -> None:
        self.latest = Meeting(host=self.latest.host, left=time.perf_counter())
