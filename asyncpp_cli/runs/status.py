"""The content of status.json: state, cause and progress of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """State of a run."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    PAUSED = "paused"
    """Trained, evaluated and saved up to the step that its launch named."""
    INTERRUPTED = "interrupted"
    DAMAGED = "damaged"
    """Its files cannot be read. Never written to status.json."""


class Cause(StrEnum):
    """Why a run ended without completing."""

    NONE = ""
    ERROR = "error"
    KILLED = "killed"
    OUT_OF_MEMORY = "out-of-memory"
    STOPPED = "stopped"
    """Stopped by a signal: preemption, or a person."""
    TIME_LIMIT = "time-limit"
    CANCELLED = "cancelled"
    RESTARTED = "restarted"
    """SLURM took its nodes away, or one of them failed."""
    REFUSED = "refused"
    """The job refused to start: something has changed since it was submitted."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """The content of status.json. Times are seconds since 1970."""

    state: State = State.PENDING
    attempt: int = 0
    """Number of the latest attempt, from 1; 0: none."""
    step: int = 0
    """Steps completed."""
    steps: int = 0
    """Steps of the whole run."""
    reason: str = ""
    """Why it ended without completing, for people."""
    cause: Cause = Cause.NONE
    """The same as one of a few kinds."""
    started: float | None = None
    updated: float | None = None
    ended: float | None = None
    host: str = ""
    pids: list[int] = field(default_factory=list)
    """Process of each rank; 0 if not yet known."""
    train_loss: float | None = None
    """Nats per token."""
    tokens_per_second: float | None = None


def is_done(status: Status, *, until: int | None) -> bool:
    """Whether a run has trained as far as a launch asks for: to `until`, or to the end if that is None."""
    paused = status.state == State.PAUSED and until is not None and status.step >= until
    return paused or status.state == State.COMPLETED


_MAX_INTEGER = 2**53
"""Largest integer that all JSON readers represent exactly."""


def status_from(content: Mapping[str, Any]) -> Status:
    """The status in a file's content. Unknown fields are ignored.

    Raises:
        ValueError: a field is missing, or of another type or size.
    """
    if "state" not in content:
        raise ValueError("it has no state")
    try:
        state, cause = State(content["state"]), Cause(content.get("cause", ""))
    except TypeError as error:
        raise ValueError(f"{content['state']!r:.60} is not a state") from error
    if state == State.DAMAGED:
        raise ValueError("'damaged' is not a state of a run")
    known = {key: content[key] for key in Status.__dataclass_fields__ if key in content}
    for key, value in known.items():
        if key not in ("state", "cause") and not _is_valid(key, value):
            raise ValueError(f"{key} is {value!r:.60}")
    return Status(**known | {"state": state, "cause": cause})


def _is_valid(key: str, value: Any) -> bool:
    match key:
        case "attempt" | "step" | "steps":
            return type(value) is int and 0 <= value <= _MAX_INTEGER
        case "reason" | "host":
            return isinstance(value, str)
        case "pids":
            return isinstance(value, list) and all(type(pid) is int for pid in value)
        case "started" | "updated" | "ended":
            return value is None or (_is_number(value) and math.isfinite(value))
        case _:
            return value is None or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) <= _MAX_INTEGER)
