"""The `end` or `pause` row of the metrics: a run is completed or paused only with it, whatever the exit codes
of its processes."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_START = b'"kind": "start"'


def missing_end_row(metrics: Path, *, attempt: int, steps: int) -> str:
    """What is wrong with the last row of the metrics; empty if it completes the run.

    It must be the `end` row of this attempt, with the step count and the hash of the weights.

    Args:
        metrics: the run's metrics.jsonl.
        attempt: number of the attempt that ended.
        steps: steps of the whole run.
    """
    last, problem = _last_row(metrics, kind="end", attempt=attempt)
    if problem:
        return problem
    if last.get("step") != steps:
        return f"the end row of {metrics.name} is of step {last.get('step')}, and the run has {steps}"
    if not re.fullmatch(r"[0-9a-f]{64}", str(last.get("weights_sha256"))):
        return f"the end row of {metrics.name} has no hash of the weights"
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


def _last_row(metrics: Path, *, kind: str, attempt: int) -> tuple[Mapping[str, Any], str]:
    """The last row, and what is wrong with it if it is not of this kind and attempt."""
    try:
        last, start = _last_rows(metrics)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is empty"
        return {}, f"{metrics.name} cannot be read: {reason}"
    if start is None or start.get("attempt", attempt) != attempt:
        return {}, f"{metrics.name} has no row of this attempt"
    if last is None or last.get("kind") != kind:
        actual = f"of kind {last['kind']}" if last is not None and "kind" in last else "damaged"
        return {}, f"the last row of {metrics.name} is {actual}, not the {kind} row"
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


def _row_at(content: mmap.mmap, position: int) -> Mapping[str, Any] | None:
    """The row in the line that contains this byte."""
    if position < 0:
        return None
    first = content.rfind(b"\n", 0, position) + 1
    try:
        row = json.loads(content[first : content.find(b"\n", position) + 1])
    except ValueError:
        return None  # torn
    return row if isinstance(row, dict) else None
