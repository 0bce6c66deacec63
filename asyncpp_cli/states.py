"""What a run's status file says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """What a run's status says."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    DAMAGED = "damaged"
    """Its files cannot be read. No file says so: it is what those see who look."""


class Cause(StrEnum):
    """What ended a run that did not complete, in a word."""

    NONE = ""
    ERROR = "error"
    KILLED = "killed"
    OUT_OF_MEMORY = "out-of-memory"
    STOPPED = "stopped"
    """Told to end: a preemption, a person."""
    TIME_LIMIT = "time-limit"
    CANCELLED = "cancelled"
    RESTARTED = "restarted"
    """SLURM has taken its nodes away, or one of them failed."""
    REFUSED = "refused"
    """The job would not begin: something has changed since it was submitted."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """The content of status.json. Times are seconds since 1970."""

    state: State = State.PENDING
    attempt: int = 0
    """Number of the latest attempt, from 1; 0: never started."""
    step: int = 0
    """Steps done."""
    steps: int = 0
    """Steps of the whole run."""
    reason: str = ""
    """Why it ended, where it did not complete."""
    cause: Cause = Cause.NONE
    """The same in a word."""
    started: float | None = None
    updated: float | None = None
    ended: float | None = None
    host: str = ""
    pids: list[int] = field(default_factory=list)
    """Process of each rank, as far as known."""
    train_loss: float | None = None
    """Nats a token."""
    tokens_per_second: float | None = None


_LARGEST = 2**53
"""Of a count: what JSON's readers agree on."""


def status_from(content: Mapping[str, Any]) -> Status:
    """The status that a file holds. Unknown fields are left out.

    Raises:
        ValueError: a field is missing, or of another type or size.
    """
    if "state" not in content:
        raise ValueError("it has no state")
    try:
        state, cause = State(content["state"]), Cause(content.get("cause", ""))
    except TypeError as error:
        raise ValueError(f"{content['state']!r:.60} is no state") from error
    if state == State.DAMAGED:
        raise ValueError("'damaged' is no state that a run is in")
    known = {key: content[key] for key in Status.__dataclass_fields__ if key in content}
    for key, value in known.items():
        if key not in ("state", "cause") and not _fits(key, value):
            raise ValueError(f"{key} is {value!r:.60}")
    return Status(**known | {"state": state, "cause": cause})


def _fits(key: str, value: Any) -> bool:
    match key:
        case "attempt" | "step" | "steps":
            return type(value) is int and 0 <= value <= _LARGEST
        case "reason" | "host":
            return isinstance(value, str)
        case "pids":
            return isinstance(value, list) and all(type(pid) is int for pid in value)
        case "started" | "updated" | "ended":
            return value is None or (_is_number(value) and math.isfinite(value))
        case _:
            return value is None or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) <= _LARGEST)
