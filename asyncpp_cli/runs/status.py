"""The content of status.json: state, cause and progress of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from stages.config.records import Count, Meta

AttemptNumber = Annotated[int, Meta(ge=0, le=100_000)]
CLOCK_MARGIN = 20.0
"""Seconds by which the clocks of two machines may differ where their times are compared."""

Time = Annotated[float, Meta(ge=0, le=1e12)]
"""Seconds since 1970."""


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
    UNREADABLE = "unreadable"
    """This user has no right to read its files. Never written to status.json."""


UNKNOWN = (State.DAMAGED, State.UNREADABLE)
"""States of runs whose files cannot be read."""


def state_after(error: BaseException) -> State:
    """State of a run of which reading a file raised this."""
    forbidden = isinstance(error, PermissionError) or isinstance(error.__cause__, PermissionError)
    return State.UNREADABLE if forbidden else State.DAMAGED


class Cause(StrEnum):
    """Why a run ended without completing."""

    NONE = ""
    ERROR = "error"
    KILLED = "killed"
    OUT_OF_MEMORY = "out-of-memory"
    NO_SPACE = "no-space"
    """A disk was full, or a quota used up."""
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
    """The content of status.json."""

    state: State
    attempt: AttemptNumber = 0
    """Number of the latest attempt, from 1; 0: none."""
    step: Count = 0
    """Steps completed."""
    steps: Count = 0
    """Steps of the whole run."""
    reason: str = ""
    """Why it ended without completing, for people."""
    cause: Cause = Cause.NONE
    """Kind of reason for which it ended without completing."""
    started: Time | None = None
    updated: Time | None = None
    ended: Time | None = None
    seconds: Annotated[float, Meta(ge=0)] | None = None
    """From the claim of the latest attempt to its last sign of life, whatever the clocks show."""
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
