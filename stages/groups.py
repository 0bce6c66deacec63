"""What several ranks do together: exchange numbers, add gradients, spread weights.

A rank takes part in groups of two kinds and in none of the whole world: with the ranks of its pipeline, and
with its data-parallel peers, those of the other pipelines that hold the same stages. A `Group` has two forms,
as `Links` has: `DistributedGroup` between processes and `InProcessGroup` between ranks that take turns. The
members of a group begin the same exchanges in the same order.

Sums are taken in the order of the ranks, never around a ring, so that both forms get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from stages.communicator import Communicator, Work
from stages.reduction import Reducer, add_up
from stages.rounds import ReductionPlan

T = TypeVar("T")


@dataclass(frozen=True)
class Exchange(Generic[T]):
    """Something between ranks that is under way."""

    ready: Callable[[], bool]
    """Whether `take` can be had without waiting."""
    wait: Callable[[], None]
    """Wait for it. Not between ranks that take turns: they let the others go on until it is ready."""
    take: Callable[[], T]
    """What it gives; called once, when it is ready."""
    device_waits: bool = field(default=False, kw_only=True)
    """Whether it may be taken at once: what is launched behind it waits, in the device's queue."""


@dataclass(frozen=True)
class Reduction(Exchange[None]):
    """The members' gradients of a stage, being added. Taking it leaves the sums in this member's part."""

    advance: Callable[[int], None]
    """Say how many parameters, counted from the end of the model, have their whole gradient; all must in the
    end. What can be exchanged is begun."""


class Group(Protocol):
    """Ranks that exchange, as one of them sees them."""

    rank: int
    """Of this member, 0 .. size - 1."""
    size: int

    @property
    def room_bytes(self) -> int:
        """Of the buffers that gradients are exchanged in."""

    def share(self, numbers: Tensor) -> Exchange[list[Tensor]]:
        """Begin to give all members `numbers`, of one shape everywhere; gives those of all, by rank."""

    def reduce(self, flat: Tensor, plan: ReductionPlan, *, early: bool) -> Reduction:
        """Prepare to add the members' buffers in the order of their ranks; `advance` begins it.

        Taking it leaves the sums in this member's part of its own buffer. Until every member has taken its
        part no one may write to its buffer but for its own part.

        Args:
            flat: this member's buffer.
            plan: of the stage.
            early: whether it is to begin before all of the buffer is there; the same for every member.
        """

    def spread(self, flat: Tensor, bounds: Sequence[int]) -> Exchange[None]:
        """Begin to give all members this member's part of `flat`; taking it completes their `flat`.

        The buffer must stay as it is until every member has taken theirs.
        """


class Alone:
    """A group of one."""

    rank = 0
    size = 1
    room_bytes = 0

    def share(self, numbers: Tensor) -> Exchange[list[Tensor]]:
        return _at_once([numbers])

    def reduce(self, flat: Tensor, plan: ReductionPlan, *, early: bool) -> Reduction:
        return Reduction(ready=lambda: True, wait=lambda: None, take=lambda: None, advance=lambda whole: None)

    def spread(self, flat: Tensor, bounds: Sequence[int]) -> Exchange[None]:
        return _at_once(None)


class DistributedGroup:
    """A group of processes.

    Args:
        communicator: of this group alone.
        rank: of this process in it.
        size: of it.
        device_waits: whether to wait for an exchange holds up the device and not the host: so it is with
            NCCL.
    """

    def __init__(
        self, communicator: Communicator, *, rank: int, size: int, device_waits: bool = False
    ) -> None:
        self.rank = rank
        self.size = size
        self._communicator = communicator
        self._device_waits = device_waits
        self._reducer = Reducer(communicator, rank=rank, size=size, device_waits=device_waits)

    @property
    def room_bytes(self) -> int:
        return self._reducer.room_bytes

    def share(self, numbers: Tensor) -> Exchange[list[Tensor]]:
        parts = [torch.empty_like(numbers) for _ in range(self.size)]
        work = self._communicator.allgather([parts], [numbers])
        return _under_way([work], lambda: parts, device_waits=self._device_waits)

    def reduce(self, flat: Tensor, plan: ReductionPlan, *, early: bool) -> Reduction:
        reducer = self._reducer
        asked = reducer.ask(flat, plan, early=early)

        def ready() -> bool:
            reducer.go_on()
            return asked.done

        def wait() -> None:
            reducer.go_on(until=asked)

        return Reduction(
            ready=ready, wait=wait, take=wait, advance=lambda whole: reducer.advance(asked, whole=whole)
        )

    def spread(self, flat: Tensor, bounds: Sequence[int]) -> Exchange[None]:
        works = [
            self._communicator.broadcast(flat[start:end], owner)
            for owner, (start, end) in enumerate(pairwise(bounds))
            if end > start
        ]
        return _under_way(works, lambda: None, device_waits=self._device_waits)


class Meeting:
    """Where the members of an in-process group leave what they bring, exchange after exchange."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._incomplete: dict[int, dict[int, Tensor]] = {}

    def bring(self, exchange: int, rank: int, part: Tensor) -> dict[int, Tensor]:
        """The parts brought to `exchange`, by rank; complete once all members have brought theirs."""
        parts = self._incomplete.setdefault(exchange, {})
        parts[rank] = part
        if len(parts) == self.size:
            del self._incomplete[exchange]
        return parts


class InProcessGroup:
    """A group of ranks that take turns in one process; `rank` is this one in the order of `meeting`."""

    room_bytes = 0

    def __init__(self, meeting: Meeting, *, rank: int) -> None:
        self.rank = rank
        self.size = meeting.size
        self._meeting = meeting
        self._numbers = count()

    def share(self, numbers: Tensor) -> Exchange[list[Tensor]]:
        return self._exchange(numbers, lambda parts: parts)

    def reduce(self, flat: Tensor, plan: ReductionPlan, *, early: bool) -> Reduction:
        part = slice(*plan.bounds[self.rank : self.rank + 2])
        begun: list[Exchange[None]] = []

        def sum_part(buffers: list[Tensor]) -> None:
            first, *others = (buffer[part] for buffer in buffers)
            add_up(first.clone(), others, into=flat[part])

        def advance(whole: int) -> None:
            if whole == len(plan.sizes) and not begun:
                begun.append(self._exchange(flat, sum_part))

        return Reduction(
            ready=lambda: begun[0].ready(),
            wait=lambda: begun[0].wait(),
            take=lambda: begun[0].take(),
            advance=advance,
        )

    def spread(self, flat: Tensor, bounds: Sequence[int]) -> Exchange[None]:
        def copy(buffers: list[Tensor]) -> None:
            for owner, (start, end) in enumerate(pairwise(bounds)):
                if owner != self.rank:
                    flat[start:end].copy_(buffers[owner][start:end])

        return self._exchange(flat, copy)

    def _exchange(self, part: Tensor, take: Callable[[list[Tensor]], T]) -> Exchange[T]:
        parts = self._meeting.bring(next(self._numbers), self.rank, part)

        def wait() -> None:
            raise RuntimeError("ranks that take turns do not wait for each other")

        return Exchange(
            ready=lambda: len(parts) == self.size,
            wait=wait,
            take=lambda: take([parts[rank] for rank in range(self.size)]),
        )


def sum_in_order(numbers: Sequence[Tensor]) -> Tensor:
    """The sum, added one after another."""
    total = numbers[0]
    for number in numbers[1:]:
        total = total + number
    return total


def _at_once(value: T) -> Exchange[T]:
    return Exchange(ready=lambda: True, wait=lambda: None, take=lambda: value)


def _under_way(works: Sequence[Work], take: Callable[[], T], *, device_waits: bool) -> Exchange[T]:
    def wait() -> None:
        for work in works:
            work.wait()

    def ready() -> bool:
        return all(work.is_completed() for work in works)

    def finish() -> T:
        # On a GPU, only this makes the computing stream wait; elsewhere it has been done, or takes no time.
        wait()
        return take()

    return Exchange(ready=ready, wait=wait, take=finish, device_waits=device_waits)
