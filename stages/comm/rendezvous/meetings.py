"""Meetings at the hub: each rank brings a value and gets those of all once the last has come. No torch."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field

from stages.comm.rendezvous.request import Request

_MOST_NAMED = 8
"""Missing ranks that an error names."""


@dataclass
class _Meeting:
    """One meeting that ranks are still missing from."""

    kind: str
    """`gather`, or `first`: for each of several values, that of the first rank which has one."""
    to: int | None
    """Rank that gets the result; None: all."""
    deadline: float
    requests: dict[int, Request] = field(default_factory=dict)
    """By rank; the body is what the rank brought."""


class OpenMeetings:
    """The meetings that have begun and are not complete, by name.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._meetings: dict[str, _Meeting] = {}
        self._gone: dict[int, str] = {}

    @property
    def gone(self) -> int:
        """Number of ranks that will come to no further meeting."""
        return len(self._gone)

    def is_gone(self, rank: int) -> bool:
        return rank in self._gone

    def join(self, request: Request) -> None:
        """Add what a rank brings to a meeting; the last one completes it."""
        header = request.header
        name, seconds = str(header["name"]), float(header["seconds"])
        if name not in self._meetings:
            self._meetings[name] = _Meeting(str(header["do"]), header["to"], time.monotonic() + seconds)
        meeting = self._meetings[name]
        meeting.requests[request.rank] = request
        if missing := sorted(self._gone.keys() - meeting.requests.keys()):
            self._fail(name, self._gone[missing[0]])
        elif len(meeting.requests) == self._size:
            del self._meetings[name]
            self._complete(meeting)

    def _complete(self, meeting: _Meeting) -> None:
        bodies = [meeting.requests[rank].body for rank in range(self._size)]
        if meeting.kind == "first":
            values = zip(*map(json.loads, bodies), strict=True)
            first = [next((value for value in by_rank if value is not None), None) for by_rank in values]
            result = json.dumps(first).encode()
        else:
            result = b"[" + b",".join(bodies) + b"]"
        for request in meeting.requests.values():
            request.reply(None, result if meeting.to in (None, request.rank) else b"null")

    def lose(self, rank: int, reason: str) -> None:
        """Fail all meetings, now and later, that this rank has not joined."""
        self._gone.setdefault(rank, reason)
        for name in [name for name, meeting in self._meetings.items() if rank not in meeting.requests]:
            self._fail(name, self._gone[rank])

    def next_deadline(self) -> float | None:
        """When the next meeting expires, by the monotonic clock."""
        return min((meeting.deadline for meeting in self._meetings.values()), default=None)

    def expire(self) -> None:
        """Fail the meetings whose deadline has passed."""
        now = time.monotonic()
        for name in [name for name, meeting in self._meetings.items() if now > meeting.deadline]:
            if (meeting := self._meetings.get(name)) is None:
                continue  # an answer to another meeting failed meanwhile
            missing = sorted(set(range(self._size)) - meeting.requests.keys())
            some = ", ".join(map(str, missing[:_MOST_NAMED])) + (
                ", ..." if len(missing) > _MOST_NAMED else ""
            )
            self._fail(name, f"waited too long for rank {some}")

    def _fail(self, name: str, reason: str) -> None:
        meeting = self._meetings.pop(name, None)
        for request in meeting.requests.values() if meeting is not None else ():
            request.fail(reason)
