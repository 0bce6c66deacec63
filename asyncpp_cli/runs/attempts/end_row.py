"""Whether the metrics are complete.

A run is completed or paused only with its `end` or `pause` row, whatever the exit codes of its processes. It
can resume only from a checkpoint whose rows are there: an attempt writes after the rows before it, notices
when the file is not as it wrote it, and ends with a checksum of all. So a file whose end row is intact has
every row.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncpp_cli.base.errors import DamagedError
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status
from stages.checkpoint.files import CheckpointError, folder_of, rows_before
from stages.config.records import CHECKSUM, is_intact, open_file

_START = b'"kind": "start"'


def missing_end_row(metrics: Path, *, attempt: int, steps: int) -> str:
    """What is wrong with the last row of the metrics; empty if it completes the run.

    It must be the `end` row of this attempt, with the step count and the hash of the weights.

    Args:
        metrics: the run's metrics.jsonl.
        attempt: number of the attempt that ended.
        steps: steps of the whole run.
    """
    return _not_the_end(*_last_row(metrics, kind="end", attempt=attempt), name=metrics.name, steps=steps)


def _not_the_end(last: Mapping[str, Any], problem: str, *, name: str, steps: int) -> str:
    if problem:
        return problem
    if last.get("step") != steps:
        return f"the end row of {name} is of step {last.get('step')}, and the run has {steps}"
    if not re.fullmatch(r"[0-9a-f]{64}", str(last.get("weights_sha256"))):
        return f"the end row of {name} has no hash of the weights"
    return ""


def missing_pause_row(metrics: Path, *, attempt: int, until: int) -> str:
    """What is wrong with the last row of the metrics; empty if it pauses the run at `until` or later.

    Args:
        metrics: the run's metrics.jsonl.
        attempt: number of the attempt that ended.
        until: step after which it was to pause.
    """
    last, problem = _last_row(metrics, kind="pause", attempt=attempt)
    if not problem and not (type(last.get("step")) is int and last["step"] >= until):
        problem = f"the pause row of {metrics.name} is of step {last.get('step')}, and not of {until}"
    return problem


def metrics_problem(run: Run, status: Status) -> str:
    """What is wrong with the metrics of a run that is not training, as far as it shows without parsing them.

    Empty if nothing is. A completed run must have its end row, another the rows before one of its checkpoints
    if it has any; rows must be this run's, and the checksum in the last row must be that of all before it. A
    file that has not changed since is not read again.
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
        return f"{file} cannot be read ({error})"


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
    """As `metrics_problem`; `completed`: attempt and steps of a completed run; `saved`: steps of another's
    checkpoints."""
    with open_file(run.metrics_file) as opened:
        content = opened.read()
    end, start = _row_at(content, len(content) - 1), _row_at(content, content.rfind(_START))
    if completed is not None:
        attempt, steps = completed
        name = run.metrics_file.name
        row, problem = _fitting(end, start, name=name, kind="end", attempt=attempt)
        if problem := _not_the_end(row, problem, name=name, steps=steps):
            return f"{run.metrics_file}: {problem}"
    if start is not None and (of := start.get("run", run.id)) != run.id:
        return f"{run.metrics_file} is another run's: {of!r:.200}"
    last = content[content.rfind(b"\n", 0, max(len(content) - 1, 0)) + 1 :]
    if f'"{CHECKSUM}": '.encode() in last and not is_intact(content):
        return f"{run.metrics_file} does not match its checksum: it was changed after it was written"
    return _rows_lost(run, saved, content)


def _last_row(metrics: Path, *, kind: str, attempt: int) -> tuple[Mapping[str, Any], str]:
    """The last row, and what is wrong with it if it is not of this kind and attempt."""
    try:
        last, start = _last_rows(metrics)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is empty"
        return {}, f"{metrics.name} cannot be read: {reason}"
    return _fitting(last, start, name=metrics.name, kind=kind, attempt=attempt)


def _fitting(
    last: Mapping[str, Any] | None, start: Mapping[str, Any] | None, *, name: str, kind: str, attempt: int
) -> tuple[Mapping[str, Any], str]:
    """As `_last_row`, from the last row and the last `start` row."""
    if start is None or start.get("attempt", attempt) != attempt:
        return {}, f"{name} has no row of this attempt"
    if last is None or last.get("kind") != kind:
        actual = f"of kind {last['kind']}" if last is not None and "kind" in last else "damaged"
        return {}, f"the last row of {name} is {actual}, not the {kind} row"
    return last, ""


def _last_rows(metrics: Path) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """The last row and the last `start` row; None for a line that is not a JSON object.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is empty.
    """
    with (
        metrics.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        size = len(content)
        return _row_at(content, size - 1), _row_at(content, content.rfind(_START))


def _row_at(content: bytes | mmap.mmap, position: int) -> Mapping[str, Any] | None:
    """The row in the line that contains this byte."""
    if position < 0:
        return None
    first = content.rfind(b"\n", 0, position) + 1
    return _row(content[first : content.find(b"\n", position) + 1])


def _row(line: bytes) -> Mapping[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None  # torn
    return row if isinstance(row, dict) else None
