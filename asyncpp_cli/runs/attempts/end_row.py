"""Whether the metrics are complete.

A run is completed or paused only with its `end` or `pause` row, whatever the exit codes of its processes. It
can resume only from a checkpoint whose rows are there: an attempt writes after the rows before it, notices
when the file is not as it wrote it, and ends with a checksum of all. So a file whose end row is intact has
every row.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from asyncpp_cli.base.errors import DamagedError, doing
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status, state_after
from stages.checkpoint.files import CheckpointError, folder_of, rows_before
from stages.config.records import CHECKSUM, is_intact, open_file
from stages.rows import End, Pause, Row, RowError, Start, TornError, parsed


def missing_row(metrics: Path, kind: str, *, attempt: int, step: int) -> str:
    """What is wrong with the last row of the metrics; empty if it completes or pauses the run.

    Args:
        metrics: the run's metrics.jsonl.
        kind: `end`: of `step`, with the hash of the weights; `pause`: of `step` or later.
        attempt: number of the attempt that ended, which wrote it.
        step: at which the run ends or pauses.

    Raises:
        PermissionError: this user may not read them, which says nothing about the run.
    """
    try:
        with doing("read", metrics):
            content = metrics.read_bytes()
    except PermissionError:
        raise
    except OSError as error:
        return f"{metrics.name} cannot be read: {error.strerror}"
    if not content:
        return f"{metrics.name} cannot be read: it is empty"
    return _missing(content, kind, name=metrics.name, attempt=attempt, step=step)


def _missing(content: bytes, kind: str, *, name: str, attempt: int, step: int) -> str:
    start, last = _start_row(content), _row_at(content, len(content) - 1)
    if start is None or start.attempt not in (None, attempt):
        return f"{name} has no row of this attempt"
    if not isinstance(last, End | Pause) or last.kind != kind:
        actual = "damaged" if last is None else f"of kind {last.kind}"
        return f"the last row of {name} is {actual}, not the {kind} row"
    if isinstance(last, Pause):
        paused = last.step >= step
        return "" if paused else f"the pause row of {name} is of step {last.step}, and not of {step}"
    if last.step != step:
        return f"the end row of {name} is of step {last.step}, and the run has {step}"
    has_hash = re.fullmatch(r"[0-9a-f]{64}", last.weights_sha256 or "")
    return "" if has_hash else f"the end row of {name} has no hash of the weights"


def metrics_problem(run: Run, status: Status) -> str:
    """What is wrong with the metrics of a run that is not training, as far as it shows without parsing them.

    Empty if nothing is. A completed run must have its end row, another the rows before one of its checkpoints
    if it has any; rows must be this run's, and the checksum in the last row must be that of all before it. A
    file that has not changed since is not read again.

    Raises:
        DamagedError or OSError: this user has no right to read them.
    """
    file = run.metrics_file
    completed = (status.attempt, status.steps) if status.state == State.COMPLETED else None
    try:
        saved = () if completed or not status.attempt else run.saved_steps
        try:
            found = file.stat()
        except FileNotFoundError as error:
            if completed:
                return f"{file}: {file.name} cannot be read: {error.strerror}"
            return _rows_lost(run, saved, b"")
        return _problem(run, completed, saved, found.st_mtime_ns, found.st_size)
    except (OSError, DamagedError) as error:
        if state_after(error) == State.UNREADABLE:
            raise
        return str(error) if isinstance(error, DamagedError) else f"{file} cannot be read ({error})"


def has_rows(run: Run, step: int) -> bool:
    """Whether the metrics have the rows that were written before the checkpoint of a step."""
    try:
        return not _rows_lost(run, (step,), run.metrics_file.read_bytes())
    except FileNotFoundError:
        return not _rows_lost(run, (step,), b"")


def _rows_lost(run: Run, saved: Sequence[int], content: bytes) -> str:
    """What is wrong if the metrics lack the rows before each of these checkpoints; empty if they do not."""
    lost = []
    for step in saved:
        try:
            rows = rows_before(folder_of(run.checkpoints, step), run=run.id)
        except CheckpointError:
            continue  # it is of no use itself
        if rows is None or hashlib.sha256(content[: rows.bytes]).hexdigest() == rows.sha256:
            return ""
        lost.append(f"step {step}")
    before = " and ".join(lost)
    return f"{run.metrics_file} has lost rows before {before}, where the run would resume" if lost else ""


@functools.lru_cache(maxsize=100_000)
def _problem(
    run: Run, completed: tuple[int, int] | None, saved: tuple[int, ...], changed: int, size: int
) -> str:
    """What is wrong with a run's metrics (`metrics_problem`), for a file of this time of change and size.

    Args:
        run: the run.
        completed: attempt and steps of a completed run.
        saved: steps of another's checkpoints.
        changed: time of the file's last change, nanoseconds.
        size: of the file, bytes.
    """
    with open_file(run.metrics_file) as opened:
        content = opened.read()
    if completed is not None:
        attempt, steps = completed
        if problem := _missing(content, "end", name=run.metrics_file.name, attempt=attempt, step=steps):
            return f"{run.metrics_file}: {problem}"
    start = _start_row(content)
    if start is not None and start.run not in (None, run.id):
        return f"{run.metrics_file} is another run's: {start.run!r:.200}"
    last = content[content.rfind(b"\n", 0, max(len(content) - 1, 0)) + 1 :]
    if f'"{CHECKSUM}": '.encode() in last and not is_intact(content):
        return f"{run.metrics_file} does not match its checksum: it was changed after it was written"
    return _rows_lost(run, saved, content)


def _start_row(content: bytes) -> Start | None:
    """The last `start` row."""
    row = _row_at(content, content.rfind(b'"kind": "start"'))
    return row if isinstance(row, Start) else None


def _row_at(content: bytes, position: int) -> Row | None:
    """The row in the line that contains this byte; None for one that is torn or damaged."""
    if position < 0:
        return None
    first = content.rfind(b"\n", 0, position) + 1
    try:
        return parsed(content[first : content.find(b"\n", position) + 1])
    except (TornError, RowError):
        return None
