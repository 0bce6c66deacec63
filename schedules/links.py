"""When messages arrive that share links.

Each rank sends and receives over a link of its own. Messages that a rank sends at the same time have equal
shares of its link, and so have those that it receives; a message goes at the smaller of its two shares, as
TCP connections do. Messages of a channel go one after another.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

from schedules.messages import Channel

Content = TypeVar("Content")


@dataclass(kw_only=True, eq=False)
class Transfer(Generic[Content]):
    """A message on its way between ranks."""

    channel: Channel
    sender: int
    receiver: int
    content: Content
    """What the caller wants to know when it arrives."""
    left: float
    """Time that it takes if it has the links for itself."""
    pace: int = 1
    """How many times as long it takes, as it shares them now."""
    end: float = 0.0
    """When it arrives at this pace."""


_Transfers = list[Transfer[Content]]


@dataclass(kw_only=True)
class Links(Generic[Content]):
    """The links of all ranks. Messages are sent in any order, as long as each is sent at the time of the last
    arrival or later."""

    time: float = 0.0
    to_come: list[tuple[float, int, Transfer[Content]]] = field(default_factory=list)
    """A heap: sent by the caller, at this time or later."""
    sent: int = 0
    waiting: dict[Channel, deque[Transfer[Content]]] = field(default_factory=dict)
    """For each channel in use, the messages that go after the one under way."""
    under_way: _Transfers[Content] = field(default_factory=list)
    by_sender: dict[int, _Transfers[Content]] = field(default_factory=lambda: defaultdict(list))
    by_receiver: dict[int, _Transfers[Content]] = field(default_factory=lambda: defaultdict(list))

    def send(self, transfer: Transfer[Content], *, at: float) -> None:
        heapq.heappush(self.to_come, (at, self.sent, transfer))
        self.sent += 1

    def next_arrival(self) -> tuple[float, Content] | None:
        """The next message to arrive, and when; None: none is under way."""
        while self.to_come or self.under_way:
            first = min(self.under_way, key=attrgetter("end"), default=None)
            if first is None or (self.to_come and self.to_come[0][0] < first.end):
                self.time, _, begun = heapq.heappop(self.to_come)
                if begun.channel in self.waiting:
                    self.waiting[begun.channel].append(begun)
                else:
                    self.waiting[begun.channel] = deque()
                    self._begin(begun)
                continue
            self.time = first.end
            for among in (self.under_way, self.by_sender[first.sender], self.by_receiver[first.receiver]):
                among.remove(first)
            following = self.waiting.pop(first.channel)
            if following:
                self._begin(following.popleft())
                self.waiting[first.channel] = following
            else:
                self._share_anew(first)
            return self.time, first.content
        return None

    def _begin(self, transfer: Transfer[Content]) -> None:
        transfer.end = self.time + transfer.left
        for messages in (
            self.under_way,
            self.by_sender[transfer.sender],
            self.by_receiver[transfer.receiver],
        ):
            messages.append(transfer)
        self._share_anew(transfer)

    def _share_anew(self, changed: Transfer[Content]) -> None:
        """A message has begun or arrived: others of its links are slower or faster from now on."""
        for each in (*self.by_sender[changed.sender], *self.by_receiver[changed.receiver]):
            pace = max(len(self.by_sender[each.sender]), len(self.by_receiver[each.receiver]))
            if pace != each.pace:
                each.end = self.time + (each.end - self.time) / each.pace * pace
                each.pace = pace
