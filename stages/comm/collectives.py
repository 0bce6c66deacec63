"""Collectives of the ranks of a pipeline and of the data ranks of a stage.

A rank belongs to these two groups and to none of the whole world. A `Group` has two forms, as `Links` has:
`DistributedGroup` between processes and `InProcessGroup` between the ranks of a replay. All members of a
group begin the same collectives in the same order.

Sums are taken in rank order, never around a ring, so both forms compute the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from stages.comm.communicator import Communicator, FullDuplex, Work
from stages.comm.gradient_reduction import Reducer, add_up, runs_of
from stages.comm.reduction_rounds import ReductionPlan
from stages.shape.optimizer_sharding import Run

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class Exchange(Generic[T]):
    """A collective in progress."""

    ready: Callable[[], bool]
    """Whether `take` returns without waiting."""
    wait: Callable[[], None]
    """Block until it is ready. Raises in a replay, whose ranks let each other run until it is."""
    take: Callable[[], T]
    """Its result; called once, when it is ready."""
    device_waits: bool = field(default=False, kw_only=True)
    """Whether `take` may be called at once, since work launched after it waits on the device."""

    def complete(self) -> T:
        """Wait for its result."""
        self.wait()
        return self.take()


@dataclass(frozen=True)
class Reduction(Exchange[None]):
    """A reduce-scatter of a stage's gradients in progress; `take` leaves the sums in this member's part.
    Afterwards this member's buffer may be written."""

    advance: Callable[[int], None]
    """Tell how many parameters, counted from the end of the model, have their complete gradient, in the end
    all of them; begins the exchange of what is complete."""


class Group(Protocol):
    """The ranks that take part in a collective, as seen by one member."""

    rank: int
    """This member's, 0 .. size - 1."""
    size: int

    @property
    def room_bytes(self) -> int:
        """Bytes of the buffers in which gradients are exchanged."""

    def all_gather(self, numbers: Tensor) -> Exchange[list[Tensor]]:
        """Gather the `numbers` of all members, of one shape everywhere; the result is by rank."""

    def reduce_scatter(
        self, flat: Tensor, plan: ReductionPlan, *, early: bool, part: Tensor | None = None
    ) -> Reduction:
        """Prepare to add the members' buffers in rank order; `advance` begins the exchange.

        Args:
            flat: this member's buffer, 1-d.
            plan: of the stage's reduction.
            early: whether to begin before the whole buffer is complete; the same for every member.
            part: 1-d; the sums of the entries that this member owns are written here. None: to their place in
                `flat`.
        """

    def broadcast(self, flat: Tensor, parts: Sequence[Sequence[Run]]) -> Exchange[None]:
        """Broadcast every member's part of `flat` to all; `take` completes this member's `flat`.

        Args:
            flat: this member's buffer, 1-d; it must not change until every member has taken.
            parts: of each member, the runs of its entries.
        """


class SingleRankGroup:
    """A group of one member."""

    rank = 0
    size = 1
    room_bytes = 0

    def all_gather(self, numbers: Tensor) -> Exchange[list[Tensor]]:
        return _completed([numbers])

    def reduce_scatter(
        self, flat: Tensor, plan: ReductionPlan, *, early: bool, part: Tensor | None = None
    ) -> Reduction:
        return Reduction(ready=lambda: True, wait=lambda: None, take=lambda: None, advance=lambda whole: None)

    def broadcast(self, flat: Tensor, parts: Sequence[Sequence[Run]]) -> Exchange[None]:
        return _completed(None)


class DistributedGroup:
    """A group of processes.

    Args:
        communicator: used by this group alone.
        rank: this process's in the group.
        size: number of members.
        device_waits: whether waiting for a collective blocks the device and not the host, as with NCCL.
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

    def all_gather(self, numbers: Tensor) -> Exchange[list[Tensor]]:
        parts = [torch.empty_like(numbers) for _ in range(self.size)]
        work = self._communicator.allgather([parts], [numbers])
        return _in_progress([work], lambda: parts, device_waits=self._device_waits)

    def reduce_scatter(
        self, flat: Tensor, plan: ReductionPlan, *, early: bool, part: Tensor | None = None
    ) -> Reduction:
        reducer = self._reducer
        request = reducer.ask(flat, plan, early=early, part=part)

        def ready() -> bool:
            reducer.go_on()
            return request.done

        def wait() -> None:
            reducer.go_on(until=request)

        return Reduction(
            ready=ready, wait=wait, take=wait, advance=lambda whole: reducer.advance(request, whole=whole)
        )

    def broadcast(self, flat: Tensor, parts: Sequence[Sequence[Run]]) -> Exchange[None]:
        nccl: Any = self._communicator
        if self._device_waits:
            # In one launch: there is a run for each owner, with experts one for each owner and stack.
            nccl._start_coalescing()
        receives_first = isinstance(self._communicator, FullDuplex)
        owners = sorted(range(self.size), key=lambda owner: receives_first and owner == self.rank)
        works = [
            self._communicator.broadcast(run, owner)
            for owner in owners
            for run in runs_of(flat, parts[owner])
        ]
        if self._device_waits:
            works = [nccl._end_coalescing()]
        return _in_progress(works, lambda: None, device_waits=self._device_waits)


class InProcessExchanges:
    """The incomplete exchanges of an in-process group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._incomplete: dict[int, dict[int, Any]] = {}

    def add(self, exchange: int, rank: int, part: T) -> dict[int, T]:
        """Add a member's part; returns the parts by rank, complete once all members have added theirs."""
        parts = self._incomplete.setdefault(exchange, {})
        parts[rank] = part
        if len(parts) == self.size:
            del self._incomplete[exchange]
        return parts


class InProcessGroup:
    """One rank of a group whose ranks take turns in one process (replay)."""

    room_bytes = 0

    def __init__(self, exchanges: InProcessExchanges, *, rank: int) -> None:
        self.rank = rank
        self.size = exchanges.size
        self._exchanges = exchanges
        self._numbers = count()

    def all_gather(self, numbers: Tensor) -> Exchange[list[Tensor]]:
        return self._exchange(numbers, lambda parts: parts)

    def reduce_scatter(
        self, flat: Tensor, plan: ReductionPlan, *, early: bool, part: Tensor | None = None
    ) -> Reduction:
        own = runs_of(flat, plan.ownership.runs[self.rank])
        into = own if part is None else list(torch.split(part, list(map(len, own))))
        begun: list[Exchange[None]] = []

        def sum_parts(members: list[tuple[Tensor, list[Tensor]]]) -> None:
            # For all members at once, so that each may write to its buffer as soon as it has taken its part.
            buffers = [buffer for buffer, _ in members]
            for runs, (_, targets) in zip(plan.ownership.runs, members, strict=True):
                for run in runs if targets else ():
                    first, *others = (buffer[slice(*run)] for buffer in buffers)
                    add_up(first.clone(), others, into=[targets.pop(0)])

        def advance(whole: int) -> None:
            if whole == len(plan.sizes) and not begun:
                begun.append(self._exchange((flat, into), sum_parts))

        return Reduction(
            ready=lambda: begun[0].ready(),
            wait=lambda: begun[0].wait(),
            take=lambda: begun[0].take(),
            advance=advance,
        )

    def broadcast(self, flat: Tensor, parts: Sequence[Sequence[Run]]) -> Exchange[None]:
        def copy(buffers: list[Tensor]) -> None:
            for owner, runs in enumerate(parts):
                if owner != self.rank:
                    for start, end in runs:
                        flat[start:end].copy_(buffers[owner][start:end])

        return self._exchange(flat, copy)

    def _exchange(self, part: S, take: Callable[[list[S]], T]) -> Exchange[T]:
        parts = self._exchanges.add(next(self._numbers), self.rank, part)

        def wait() -> None:
            raise RuntimeError("ranks that take turns do not wait for each other")

        return Exchange(
            ready=lambda: len(parts) == self.size,
            wait=wait,
            take=lambda: take([parts[rank] for rank in range(self.size)]),
        )


def sum_in_order(numbers: Sequence[Tensor]) -> Tensor:
    """The sum, added in the given order."""
    total = numbers[0]
    for number in numbers[1:]:
        total = total + number
    return total


def _completed(value: T) -> Exchange[T]:
    return Exchange(ready=lambda: True, wait=lambda: None, take=lambda: value)


def _in_progress(works: Sequence[Work], take: Callable[[], T], *, device_waits: bool) -> Exchange[T]:
    def wait() -> None:
        for work in works:
            work.wait()

    def ready() -> bool:
        return all(work.is_completed() for work in works)

    def finish() -> T:
        # On a GPU only this makes the compute stream wait.
        wait()
        return take()

    return Exchange(ready=ready, wait=wait, take=finish, device_waits=device_waits)
