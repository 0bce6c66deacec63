"""What ranks that torchrun started agree on before they have a rendezvous of their own: the attempt to make.

It goes through torchrun's own store, which asks nobody who he is. So nothing but the number of an attempt, or
why there is none, is taken from it: the attempt's secret is a file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

_POLL_SECONDS = 0.02


class MissingError(RuntimeError):
    """Not all ranks have come.

    Attributes:
        ranks: those that have not.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"missing ranks: {ranks}")
        self.ranks = ranks


def agree(
    rank: int, size: int, *, brought: str, seconds: float, decide: Callable[[Sequence[str]], str]
) -> str:
    """What rank 0 decides once all ranks have come; all of them call this.

    Args:
        rank: of this process.
        size: number of processes.
        brought: what this rank tells rank 0.
        seconds: how long ranks wait for each other; for the decision twice as long.
        decide: called by rank 0 with what all ranks have brought, in rank order.

    Raises:
        MissingError: a rank, or the decision of rank 0, did not come in time.
    """
    limit = timedelta(seconds=seconds)
    keys = [f"asyncpp/{each}" for each in range(size)]
    missing = [0] if rank > 0 else list(range(1, size))
    try:
        # Where no agent keeps the store, rank 0 does, and waits for the others here.
        store, _, _ = next(rendezvous("env://", timeout=limit))
        store.set(keys[rank], brought)
        if rank > 0:
            store.wait(["asyncpp/decided"], 2 * limit)
            told = str(store.get("asyncpp/decided").decode())
            store.add("asyncpp/read", 1)
            return told
        try:
            store.wait(keys, limit)
        except dist.DistStoreError:
            missing = [each for each, key in enumerate(keys) if not store.check([key])]
            raise
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise MissingError(missing) from error
    decided = decide([store.get(key).decode() for key in keys])
    store.set("asyncpp/decided", decided)
    # Where the store is in this process, it must not end before the others have read.
    deadline = time.monotonic() + seconds
    while store.add("asyncpp/read", 0) < size - 1 and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return decided
