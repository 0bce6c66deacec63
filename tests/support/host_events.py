"""Events: the work that the host of a rank launches on its device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from schedules.dependencies import Place


class Operation(NamedTuple):
    """The host starts an exchange on a communicator."""

    number: int
    """Index among this rank's operations."""
    communicator: str
    kind: str
    peer: int | None
    """Process at the other end; None where all members take part."""
    size: int
    """Elements."""
    stream: str
    """Stream whose queued work it waits for."""


class Wait(NamedTuple):
    """The host makes a stream wait for an operation."""

    number: int
    stream: str


class Mark(NamedTuple):
    """A point in a stream."""

    number: int
    """Index among this rank's marks."""
    stream: str


class WaitForMark(NamedTuple):
    """The host makes a stream wait for a mark."""

    number: int
    stream: str


class HostWait(NamedTuple):
    """The host itself waits for a mark."""

    number: int


class DeviceWait(NamedTuple):
    """The host waits until its device has nothing left to do."""

    reason: str


class At(NamedTuple):
    """The rank reaches this place of its actions."""

    place: Place


class Begin(NamedTuple):
    """A segment begins."""


class Use(NamedTuple):
    """A stream, or a communicator, reads or writes a part of a block of memory."""

    stream: str
    """The stream; the name of the communicator for its latest operation."""
    block: int
    start: int
    """Bytes from the start of the block."""
    end: int
    writes: bool
    by: str
    """Name of the operator."""


class Freed(NamedTuple):
    """The host drops its last reference to a block: later work of its stream may reuse the memory."""

    block: int
    stream: str
    """Stream that it was allocated on."""


Event = Use | Freed | DeviceWait | Operation | Wait | Mark | WaitForMark | HostWait | At | Begin

ACTIONS, UPDATES = "actions", "updates"
"""The streams of a rank."""


@dataclass
class Recording:
    """Events of all processes of a run."""

    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Ranks of each communicator."""
    events: list[list[Event]] = field(default_factory=list)
    """Events by process."""
    receives: list[dict[int, int]] = field(default_factory=list)
    """By process: action index by the operation index of the receive that it waited for."""
