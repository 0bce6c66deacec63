"""Runs as TensorBoard event files, by torch's SummaryWriter."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from asyncpp_cli.base.console import quoted
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.trackers.catalogue import PointReader, Restart
from stages.config.torch_process import importing_torch
from stages.rows import Row, TornError, parsed


class TensorBoard:
    """A `Tracker` with a folder of event files for each run; the first update replaces those of before."""

    can_append: ClassVar[bool] = True

    def __init__(self, folder: Path, *, project: str) -> None:
        try:
            with importing_torch():
                from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise UserError(
                'TensorBoard is not installed: pip install ".[tensorboard]" in the clone of asyncpp'
            ) from error
        threading.excepthook = _print_unless_kept
        self._writer = SummaryWriter
        self._folder = folder
        self._mirrors: dict[str, _Mirror] = {}

    def update(self, run: Run) -> int:
        if run.id not in self._mirrors:
            self._mirrors[run.id] = _Mirror(run, self._folder / run.id, writer=self._writer)
        return self._mirrors[run.id].update()

    @property
    def hint(self) -> str:
        return f"Look at them: tensorboard --logdir {quoted(self._folder)}"


def _print_unless_kept(failed: threading.ExceptHookArgs) -> None:
    """Print what ended a thread, unless a write was refused: the writer raises that at its next call."""
    if not isinstance(failed.exc_value, OSError):
        threading.__excepthook__(failed)


class _Mirror:
    """The event files of a run, one for each attempt."""

    def __init__(self, run: Run, folder: Path, *, writer: Any) -> None:
        self._run = run
        self._folder = folder
        self._new_writer = writer
        self._writer: Any = None
        self._reader = PointReader()
        self._bytes_read = 0
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("events.out.tfevents.*"):
            file.unlink()

    def update(self) -> int:
        """Add the rows since the last call; returns their number."""
        rows = list(self._new_rows())
        for row in rows:
            for point in self._reader.points(row):
                if isinstance(point, Restart):
                    self._begin(point)
                else:
                    self._writer.add_scalar(point.tag, point.value, point.update, walltime=point.time)
        if self._writer is not None:
            self._writer.flush()
        return len(rows)

    def _begin(self, restart: Restart) -> None:
        """Begin a file whose updates replace those that earlier files have."""
        first = self._writer is None
        if not first:
            self._writer.close()
            # Readers take files in the order of their names, which have the second that they begin in.
            time.sleep(1 - time.time() % 1)
        self._writer = self._new_writer(str(self._folder), purge_step=restart.update)
        if first:
            lines = self._run.config_file.read_text(encoding="utf-8").splitlines()
            indented = "\n".join(f"    {line}" for line in lines)
            self._writer.add_text("config.yaml", indented, walltime=restart.time)

    def _new_rows(self) -> Iterator[Row]:
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
            with contextlib.suppress(TornError):
                if (row := parsed(line)) is not None:
                    yield row
