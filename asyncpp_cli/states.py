"""What a run's status file says."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class State(StrEnum):
    """What a run's status says."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


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
