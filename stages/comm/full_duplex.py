"""Exchanges over gloo that send in both directions at once.

gloo's own alltoall and broadcasts offer to receive after they have begun to send. The offer then waits
behind what is sent, so that a link between two data ranks carries their data one way after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from stages.comm.communicator import Communicator, Work

_TAG = 0


class FullDuplex:
    """A gloo communicator whose exchanges consist of messages, of which the receives begin first.

    Args:
        gloo: used by this communicator alone.
        rank: this process's in it.
        size: number of members.
    """

    def __init__(self, gloo: Communicator, *, rank: int, size: int) -> None:
        self.send = gloo.send
        self.recv = gloo.recv
        self.allgather = gloo.allgather
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]

    def broadcast(self, tensor: Tensor, root: int, /) -> Work:
        """Members may begin their own broadcasts after those of others, in whatever order among these."""
        if root != self._rank:
            return _Waited([self.recv([tensor], root, _TAG)])
        return _Waited([self.send([tensor], other, _TAG) for other in self._others])

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list[int], given_sizes: list[int], /
    ) -> Work:
        received, sent = torch.split(output, output_sizes), torch.split(given, given_sizes)
        works = [self.recv([received[other]], other, _TAG) for other in self._others if len(received[other])]
        works += [self.send([sent[other]], other, _TAG) for other in self._others if len(sent[other])]
        received[self._rank].copy_(sent[self._rank])
        return _Waited(works)

    def _start_coalescing(self) -> None:
        raise NotImplementedError("of NCCL")

    def _end_coalescing(self) -> Work:
        raise NotImplementedError("of NCCL")


class _Waited:
    """Messages of gloo, which are completed only by waiting for them: a thread of this work does."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._wait, daemon=True, name="exchange")
        self._thread.start()

    def _wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except Exception as error:
            self._error = error

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> object:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return None
