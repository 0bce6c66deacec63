"""Recording a run while it trains: metrics rows, heartbeats in the status, the timeline, lines of its log."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import structs

from asyncpp_cli.base.atomic_files import write_bytes
from asyncpp_cli.base.console import duration
from asyncpp_cli.base.errors import FULL, doing
from asyncpp_cli.base.version import asyncpp_version, commit
from asyncpp_cli.runs.attempts.attempt import Attempt, is_superseded, taken_over
from asyncpp_cli.runs.attempts.end_row import has_rows
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import Status
from stages.checkpoint.files import FileEntry
from stages.config.records import with_checksum
from stages.rows import End, Evaluation, Pause, Row, Segment, Start, Step


class MetricsWriter:
    """Appends rows to a run's metrics, each in one write. Used by one process per run.

    It goes on in a copy of the file, so that a process of an earlier attempt that was only frozen appends
    to a file that nobody reads any more. The rows that end an attempt have a checksum of all that the file
    holds before it.
    """

    def __init__(self, run: Run) -> None:
        self._file = run.metrics_file
        with contextlib.suppress(FileNotFoundError):
            write_bytes(run.metrics_file, run.metrics_file.read_bytes(), sync=True)
        self._descriptor = os.open(run.metrics_file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        size = os.fstat(self._descriptor).st_size
        # An attempt killed in the middle of a line leaves it open: end it.
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")
        with run.metrics_file.open("rb") as written:
            self._digest = hashlib.file_digest(written, "sha256")
            self._size = written.tell()

    @property
    def is_whole(self) -> bool:
        """Whether the file is still the one that this process has written."""
        found = os.fstat(self._descriptor)
        return found.st_nlink > 0 and found.st_size == self._size

    @property
    def written(self) -> FileEntry:
        """Size and SHA-256 of the file."""
        return FileEntry(bytes=self._size, sha256=self._digest.hexdigest())

    def append(self, row: Row) -> None:
        if not self.is_whole:
            raise OSError("metrics.jsonl was removed, cut or written by others while the run writes it")
        if isinstance(row, End | Pause):
            line = with_checksum(row.encoded(), before=self._digest)
        else:
            line = f"{row.encoded()}\n".encode()
        self._digest.update(line)
        self._size += len(line)
        with doing("written", self._file):
            # What stops a write in the middle is said by the next one.
            while line:
                line = line[os.write(self._descriptor, line) :]

    def flush(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class RunRecorder:
    """Records metrics rows and heartbeats; the trainer uses it on its writer rank.

    No file is opened before the first row, so that every rank can have a recorder.

    Args:
        run: the run.
        attempt: number of the attempt.
        lines: prints progress to the log; None: nothing is printed.
    """

    _SECONDS_BETWEEN_HEARTBEATS = 0.5

    def __init__(self, run: Run, *, attempt: int, lines: StepLines | None = None) -> None:
        self._run = run
        self._lines = lines
        self._attempt = Attempt(run, attempt)
        self._metrics: MetricsWriter | None = None
        self._latest: Status | None = None
        self._written_at = -math.inf
        self._claimed = math.nan
        self._tokens_per_step = 1
        self._replayed = False
        self._last_step: Step | None = None

    def append(self, row: Row) -> None:
        """Append a row to the metrics.

        `start` rows get the run's id, the attempt and the code version, `segment` rows the machine's load.

        Raises:
            TakenOverError: the next attempt has begun to write.
        """
        if self._metrics is None:
            self._check_not_superseded()
            self._metrics = MetricsWriter(self._run)
        if not self._metrics.is_whole:
            self._check_not_superseded()
        match row:
            case Start():
                self._tokens_per_step, self._replayed = row.tokens_per_step or 1, bool(row.replayed)
                ours = {"run": self._run.id, "attempt": self._attempt.number}
                row = structs.replace(row, **ours, asyncpp=asyncpp_version(), commit=commit())
            case Segment():
                row = structs.replace(row, load_per_core=os.getloadavg()[0] / (os.cpu_count() or 1))
            case Step():
                self._last_step = row
        self._metrics.append(row)
        if self._lines is not None:
            self._lines.row(row)

    def timeline(self, timeline: Mapping[str, Any]) -> None:
        """Replace the run's timeline."""
        if not is_superseded(self._attempt):
            self._run.write_timeline(timeline)

    def flush(self) -> None:
        """Sync the metrics to disk, so that no checkpoint is newer than they are.

        Raises:
            TakenOverError: the next attempt has begun; no checkpoint may be completed any more.
        """
        if self._metrics is not None:
            self._metrics.flush()
            self._check_not_superseded()

    def written(self) -> FileEntry | None:
        """Size and SHA-256 of all rows so far; None before the first."""
        return None if self._metrics is None else self._metrics.written

    def has_rows(self, step: int) -> bool:
        """Whether the metrics still have the rows that were written before the checkpoint of a step."""
        return has_rows(self._run, step)

    def heartbeat(self, step: int, *, train_loss: float, tokens_per_second: float) -> None:
        """Update progress in the status; written at most twice per second, later where the system refuses.

        A replay has no rate: its ranks take turns.
        """
        now = time.monotonic()
        if self._latest is None:
            self._claimed = now - self._attempt.seconds()
        self._latest = replace(
            self._latest or self._run.status(),
            step=step,
            train_loss=train_loss,
            tokens_per_second=None if self._replayed else tokens_per_second,
            updated=time.time(),
            seconds=now - self._claimed,
        )
        if now - self._written_at >= self._SECONDS_BETWEEN_HEARTBEATS:
            superseded = partial(is_superseded, self._attempt)
            self._written_at = now
            try:
                self._run.write_status(self._latest, unless=superseded)
            except FileNotFoundError:
                if not superseded():
                    raise
            except OSError as error:
                if error.errno in FULL:
                    raise

    def close(self) -> None:
        """Write the final progress with the mean throughput to the status, and close the metrics."""
        if (row := self._last_step) is not None:
            rate = row.tokens / row.seconds if row.seconds else 0.0
            self._written_at = -math.inf
            step = row.tokens // self._tokens_per_step
            self.heartbeat(step, train_loss=_loss(row), tokens_per_second=rate)
        if self._metrics is not None:
            self._metrics.close()

    def _check_not_superseded(self) -> None:
        if is_superseded(self._attempt):
            raise taken_over(self._attempt)


_SECONDS_BETWEEN_LINES = 5.0


class StepLines:
    """Prints progress lines on standard output, on the one rank that has the loss.

    Args:
        steps: steps of the whole run.
    """

    def __init__(self, *, steps: int) -> None:
        self._steps = steps
        self._began: tuple[float, int] = 0.0, 0
        self._tokens_per_step = 1
        self._replayed = False
        self._printed: tuple[float, int] | None = None
        """Time of the last step line, and tokens trained until then."""

    def row(self, row: Row) -> None:
        """Print a line for a metrics row, if it calls for one."""
        match row:
            case Start():
                self._began = time.monotonic(), row.step
                self._tokens_per_step, self._replayed = row.tokens_per_step or 1, bool(row.replayed)
                after = f"resuming after step {row.step}" if row.step else "beginning"
                count, active = row.parameters or 0, row.active_parameters or 0
                parameters = f"{count:,} parameters" + (f" ({active:,} active)" if active < count else "")
                _print(f"{after} of {self._steps}: {parameters}, on {row.device}")
            case Step():
                # Some schedules have several updates per step.
                step = row.tokens // self._tokens_per_step
                self._step(step, tokens=row.tokens, train_loss=_loss(row))
            case Evaluation():
                _print(f"step {row.step}: validation loss {row.val_loss:.4f}")
            case End():
                _print(f"completed: {self._steps} steps")
            case Pause():
                _print(f"paused after step {row.step} of {self._steps}")

    def _step(self, step: int, *, tokens: int, train_loss: float) -> None:
        """Print a step line, at most one every few seconds."""
        now = time.monotonic()
        figures = ""
        if self._printed is not None:
            last, last_tokens = self._printed
            if now - last < _SECONDS_BETWEEN_LINES:
                return
            began, first = self._began
            remaining = (now - began) / max(1, step - first) * (self._steps - step)
            rate = f", {(tokens - last_tokens) / (now - last):,.0f} tokens/s" if not self._replayed else ""
            figures = f"{rate}, {duration(remaining)} remaining"
        self._printed = now, tokens
        _print(f"step {step} of {self._steps}: training loss {train_loss:.4f}{figures}")


def _loss(row: Step) -> float:
    return math.nan if row.train_loss is None else row.train_loss


def _print(line: str) -> None:
    # A closed pipe or a full disk must not stop training.
    with contextlib.suppress(OSError, ValueError):
        print(line, flush=True)
