"""A run's metrics as a TensorBoard event file.

The file is a function of metrics.jsonl, and a longer metrics.jsonl gives a file that begins with the earlier
one. So mirroring again appends what is new and nothing twice, also after a mirror that was killed.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncpp_cli.errors import UserError
from asyncpp_cli.runs import Run
from asyncpp_cli.trackers.points import Curves, Restart

EVENT_FILE = "events.out.tfevents.0.asyncpp"


class EventFile:
    """The mirror of one run; `update` brings it up to date with the run's metrics.

    Raises:
        UserError: TensorBoard is not installed.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2
        except ImportError as error:
            raise UserError(
                'TensorBoard is not installed; install it with pip install "asyncpp[tensorboard]"'
            ) from error
        self._run = run
        self._file = folder / EVENT_FILE
        self._event = event_pb2
        self._curves = Curves()
        self._read = 0
        self._written = 0
        self._described = False
        folder.mkdir(parents=True, exist_ok=True)

    def update(self) -> int:
        """Mirror the rows written since the last call; returns how many they are."""
        rows = list(self._new_rows())
        records = io.BytesIO()
        for row in rows:
            for event in self._events(row):
                records.write(_record(event.SerializeToString()))
        new = records.getvalue()
        if self._written == 0:
            self._begin(new)
        elif new:
            with self._file.open("ab") as opened:
                opened.write(new)
        self._written += len(new)
        return len(rows)

    def _begin(self, whole: bytes) -> None:
        """Bring a file of an earlier mirror up to date, or replace one that is something else."""
        there = self._file.read_bytes() if self._file.exists() else b""
        if whole.startswith(there):
            with self._file.open("ab") as opened:
                opened.write(whole[len(there) :])
            return
        fresh = self._file.with_name(f".{EVENT_FILE}")
        fresh.write_bytes(whole)
        fresh.replace(self._file)

    def _new_rows(self) -> Iterator[dict[str, Any]]:
        try:
            with self._run.metrics_file.open("rb") as opened:
                opened.seek(self._read)
                new = opened.read()
        except FileNotFoundError:
            return
        # A line that is being written is left for the next time.
        complete = new[: new.rfind(b"\n") + 1]
        self._read += len(complete)
        for line in complete.splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and "kind" in row:
                yield row

    def _events(self, row: dict[str, Any]) -> Iterator[Any]:
        event = self._event.Event
        for point in self._curves.of(row):
            if isinstance(point, Restart):
                if not self._described:
                    self._described = True
                    yield event(wall_time=point.time, file_version="brain.Event:2")
                    yield self._description(point.time)
                start = self._event.SessionLog(status=self._event.SessionLog.START)
                yield event(wall_time=point.time, step=point.update, session_log=start)
                continue
            made = event(wall_time=point.time, step=point.update)
            made.summary.value.add(tag=point.tag, simple_value=point.value)
            yield made

    def _description(self, time: float) -> Any:
        """The run's configuration, as text."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        lines = self._run.config_file.read_text(encoding="utf-8").splitlines()
        indented = "\n".join(f"    {line}" for line in lines)
        return self._event.Event(wall_time=time, summary=text_pb("config.yaml", indented))


def _record(content: bytes) -> bytes:
    """A record of an event file, with its checksums."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    written = io.BytesIO()
    RecordWriter(written).write(content)
    return written.getvalue()
