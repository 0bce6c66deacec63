"""Messages between processes that share a GPU, which NCCL refuses: through the host's memory, over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from stages.communicator import Communicator, Work


class ThroughHost:
    """A communicator for tensors of a GPU on top of one for tensors of the host.

    The host waits for every copy: it serves to try out on one GPU what runs on many, not to be fast. What
    gloo itself takes from a GPU differs between its operations and its builds.
    """

    def __init__(self, host: Communicator) -> None:
        self._host = host

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> Work:
        return self._host.send([_copy(tensor) for tensor in tensors], to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> Work:
        copies = [_copy(tensor) for tensor in tensors]
        return _Arriving(self._host.recv(copies, source, tag), copies, into=tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> Work:
        copies = [[_copy(tensor) for tensor in part] for part in outputs]
        work = self._host.allgather(copies, [_copy(tensor) for tensor in inputs])
        return _Arriving(work, [*chain(*copies)], into=[*chain(*outputs)])

    def broadcast(self, tensor: Tensor, root: int, /) -> Work:
        copy = _copy(tensor)
        return _Arriving(self._host.broadcast(copy, root), [copy], into=[tensor])

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list[int], given_sizes: list[int], /
    ) -> Work:
        copy = _copy(output)
        work = self._host.alltoall_base(copy, _copy(given), output_sizes, given_sizes)
        return _Arriving(work, [copy], into=[output])


class _Arriving:
    """Work whose results lie in the host's memory until it is waited for."""

    def __init__(self, work: Work, copies: Sequence[Tensor], *, into: Sequence[Tensor]) -> None:
        self._work = work
        self._left = list(zip(copies, into, strict=True))

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> object:
        self._work.wait()
        while self._left:
            copy, tensor = self._left.pop()
            # Unseen by autograd, as what NCCL and gloo write is.
            tensor.data.copy_(copy)
        return None


def _copy(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach())
