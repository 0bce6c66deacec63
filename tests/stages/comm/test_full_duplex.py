"""Exchanges of data ranks over gloo: what must hold so that both directions of a link carry data at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.comm.collectives import DistributedGroup
from stages.comm.communicator import FullDuplex
from stages.comm.reduction_rounds import reduction_plan
from stages.shape.optimizer_sharding import assign_owners

SIZE = 3
SIZES = [4] * SIZE


class Message:
    """A message that is completed when the test says so, and only while somebody waits for it."""

    def __init__(self, over: threading.Event, error: Exception | None) -> None:
        self._over, self._error = over, error

    def wait(self) -> object:
        assert self._over.wait(timeout=300)
        if self._error is not None:
            raise self._error
        return None

    def is_completed(self) -> bool:
        return False


class Gloo:
    """Records which messages begin, in order."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.over = threading.Event()
        self.error: Exception | None = None
        self.allgather: Any = None
        self._allgather_base: Any = None

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> Message:
        self.begun.append(("send", to))
        return Message(self.over, self.error)

    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> Message:
        self.begun.append(("receive", source))
        return Message(self.over, None)


@pytest.fixture
def gloo() -> Gloo:
    return Gloo()


@pytest.fixture
def group(gloo: Gloo) -> DistributedGroup:
    """That of the first of three data ranks, whose own part is the first in every exchange."""
    communicator: Any = FullDuplex(gloo, rank=0, size=SIZE)  # type: ignore[arg-type]
    return DistributedGroup(communicator, rank=0, size=SIZE)


RECEIVES_FIRST = [("receive", 1), ("receive", 2), ("send", 1), ("send", 2)]


@pytest.mark.parametrize("exchange", ["reduction", "broadcast"])
def test_receives_begin_before_sends_which_would_hold_up_their_offers(
    exchange: str, gloo: Gloo, group: DistributedGroup
) -> None:
    flat = torch.zeros(sum(SIZES))
    ownership = assign_owners([(size,) for size in SIZES], data_ranks=SIZE)
    if exchange == "broadcast":
        begun: Any = group.broadcast(flat, ownership.runs)
    else:
        begun = group.reduce_scatter(flat, reduction_plan(SIZES, ownership, number_bytes=4), early=False)
        begun.advance(SIZE)
    assert gloo.begun == RECEIVES_FIRST
    assert not begun.ready()
    gloo.over.set()
    begun.wait()
    assert begun.ready()


def test_an_exchange_is_ready_without_anybody_waiting_and_raises_where_it_is_waited_for(
    gloo: Gloo, group: DistributedGroup
) -> None:
    gloo.error = RuntimeError("connection closed")
    ownership = assign_owners([(size,) for size in SIZES], data_ranks=SIZE)
    exchange = group.broadcast(torch.zeros(sum(SIZES)), ownership.runs)
    gloo.over.set()
    while not exchange.ready():
        threading.Event().wait(0.01)
    with pytest.raises(RuntimeError, match="connection closed"):
        exchange.wait()
