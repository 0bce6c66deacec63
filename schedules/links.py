"""When messages arrive that share links.

Each rank sends and receives over a link of its own. Messages that a rank sends at the same time have equal
shares of its link, and so have those that it receives; a message goes at the smaller of its two shares, as
TCP connections do. Messages of a channel go one after another.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from schedules.messages import Channel

Content = TypeVar("Content")


@dataclass(kw_only=True)
class Transfer(Generic[Content]):
    """A message on its way between ranks."""

    channel: Channel
    sender: int
    receiver: int
    content: Content
    """What the caller wants to know when it arrives."""
    left: float
    """Time that the rest of it takes if it has the links for itself."""


@dataclass(kw_only=True)
class Links(Generic[Content]):
    """The links of all ranks. Messages are sent in any order, as long as each is sent at the time of the last
    arrival or later."""

    time: float = 0.0
    to_come: list[tuple[float, int, Transfer[Content]]] = field(default_factory=list)
    """A heap: sent by the caller, at this time or later."""
    sent: int = 0
    waiting: dict[Channel, deque[Transfer[Content]]] = field(default_factory=dict)
    """Of each channel that is in use: what goes after the message under way."""
    under_way: list[Transfer[Content]] = field(default_factory=list)

    def send(self, transfer: Transfer[Content], *, at: float) -> None:
        heapq.heappush(self.to_come, (at, self.sent, transfer))
        self.sent += 1

    def next_arrival(self) -> tuple[float, Content] | None:
        """The next message to arrive, and when; None: none is under way."""
        while self.to_come or self.under_way:
            paces = self._paces()
            ends = [self.time + each.left * pace for each, pace in zip(self.under_way, paces, strict=True)]
            first = min(range(len(ends)), key=ends.__getitem__, default=None)
            if first is None or (self.to_come and self.to_come[0][0] < ends[first]):
                until, _, begun = heapq.heappop(self.to_come)
                self._pass(until, paces)
                self._begin(begun)
                continue
            self._pass(ends[first], paces)
            arrived = self.under_way.pop(first)
            following = self.waiting.pop(arrived.channel)
            if following:
                self.under_way.append(following.popleft())
                self.waiting[arrived.channel] = following
            return self.time, arrived.content
        return None

    def _paces(self) -> list[int]:
        """Of each message under way, how many times as long it takes as one that has the links for itself."""
        senders = Counter(each.sender for each in self.under_way)
        receivers = Counter(each.receiver for each in self.under_way)
        return [max(senders[each.sender], receivers[each.receiver]) for each in self.under_way]

    def _pass(self, until: float, paces: list[int]) -> None:
        for each, pace in zip(self.under_way, paces, strict=True):
            each.left = max(0.0, each.left - (until - self.time) / pace)
        self.time = until

    def _begin(self, transfer: Transfer[Content]) -> None:
        if transfer.channel in self.waiting:
            self.waiting[transfer.channel].append(transfer)
        else:
            self.waiting[transfer.channel] = deque()
            self.under_way.append(transfer)
