"""Runs as TensorBoard event files.

The event file of a longer metrics.jsonl begins with that of the shorter one. So an update appends what is
new and writes nothing twice, also after an update that was killed.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from asyncpp_cli.base.console import quoted
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.trackers.points import PointReader, Restart

EVENT_FILE = "events.out.tfevents.0.asyncpp"


class TensorBoard:
    """A `Tracker` with an event file for each run."""

    can_append: ClassVar[bool] = True

    def __init__(self, folder: Path, *, project: str) -> None:
        try:
            from tensorboard.compat.proto import event_pb2
        except ImportError as error:
            raise UserError(
                'TensorBoard is not installed; install it with pip install "asyncpp[tensorboard]"'
            ) from error
        self._protocol = event_pb2
        self._folder = folder
        self._files: dict[str, _EventFile] = {}

    def update(self, run: Run) -> int:
        if run.id not in self._files:
            self._files[run.id] = _EventFile(run, self._folder / run.id, protocol=self._protocol)
        return self._files[run.id].update()

    @property
    def hint(self) -> str:
        return f"Look at them: tensorboard --logdir {quoted(self._folder)}"


class _EventFile:
    """The event file of a run."""

    def __init__(self, run: Run, folder: Path, *, protocol: Any) -> None:
        self._run = run
        self._file = folder / EVENT_FILE
        self._protocol = protocol
        self._reader = PointReader()
        self._bytes_read = 0
        self._bytes_written = 0
        self._described = False
        folder.mkdir(parents=True, exist_ok=True)

    def update(self) -> int:
        """Add the rows since the last call; returns their number."""
        rows = list(self._new_rows())
        records = io.BytesIO()
        for row in rows:
            for event in self._events(row):
                records.write(_record(event.SerializeToString()))
        content = records.getvalue()
        if self._bytes_written == 0:
            self._continue_or_replace(content)
        elif content:
            self._append(content)
        self._bytes_written += len(content)
        return len(rows)

    def _append(self, content: bytes) -> None:
        with self._file.open("ab") as file:
            file.write(content)

    def _continue_or_replace(self, content: bytes) -> None:
        """Complete an earlier mirror's file, or replace a file that `content` does not continue."""
        present = self._file.read_bytes() if self._file.exists() else b""
        if content.startswith(present):
            self._append(content[len(present) :])
            return
        temporary = self._file.with_name(f".{EVENT_FILE}")
        temporary.write_bytes(content)
        temporary.replace(self._file)

    def _new_rows(self) -> Iterator[dict[str, Any]]:
        try:
            with self._run.metrics_file.open("rb") as file:
                file.seek(self._bytes_read)
                content = file.read()
        except FileNotFoundError:
            return
        # A line without its end is still being written.
        complete = content[: content.rfind(b"\n") + 1]
        self._bytes_read += len(complete)
        for line in complete.splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and "kind" in row:
                yield row

    def _events(self, row: dict[str, Any]) -> Iterator[Any]:
        event_of = self._protocol.Event
        for point in self._reader.points(row):
            if isinstance(point, Restart):
                if not self._described:
                    self._described = True
                    yield event_of(wall_time=point.time, file_version="brain.Event:2")
                    yield self._configuration(point.time)
                start = self._protocol.SessionLog(status=self._protocol.SessionLog.START)
                yield event_of(wall_time=point.time, step=point.update, session_log=start)
                continue
            event = event_of(wall_time=point.time, step=point.update)
            event.summary.value.add(tag=point.tag, simple_value=point.value)
            yield event

    def _configuration(self, time: float) -> Any:
        """The run's configuration as a text summary."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        lines = self._run.config_file.read_text(encoding="utf-8").splitlines()
        indented = "\n".join(f"    {line}" for line in lines)
        return self._protocol.Event(wall_time=time, summary=text_pb("config.yaml", indented))


def _record(content: bytes) -> bytes:
    """A record of an event file, with its checksums."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    stream = io.BytesIO()
    RecordWriter(stream).write(content)
    return stream.getvalue()
