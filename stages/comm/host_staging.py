"""Messages through host memory over gloo, between processes that share a GPU, which NCCL refuses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from stages.comm.communicator import Communicator, Work


class HostStaged:
    """A communicator for GPU tensors on top of one for host tensors.

    The host waits for every copy: this is for trying out on one GPU what runs on many, not for speed. Which
    operations gloo itself supports on GPU tensors differs between its builds.
    """

    def __init__(self, host: Communicator) -> None:
        self._host = host

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> Work:
        return self._host.send([_copy(tensor) for tensor in tensors], to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> Work:
        copies = [_copy(tensor) for tensor in tensors]
        return _StagedWork(self._host.recv(copies, source, tag), copies, into=tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> Work:
        copies = [[_copy(tensor) for tensor in part] for part in outputs]
        work = self._host.allgather(copies, [_copy(tensor) for tensor in inputs])
        return _StagedWork(work, [*chain(*copies)], into=[*chain(*outputs)])

    def broadcast(self, tensor: Tensor, root: int, /) -> Work:
        copy = _copy(tensor)
        return _StagedWork(self._host.broadcast(copy, root), [copy], into=[tensor])

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list[int], given_sizes: list[int], /
    ) -> Work:
        copy = _copy(output)
        work = self._host.alltoall_base(copy, _copy(given), output_sizes, given_sizes)
        return _StagedWork(work, [copy], into=[output])

    def _start_coalescing(self) -> None:
        raise NotImplementedError("the host waits for every operation")

    def _end_coalescing(self) -> Work:
        raise NotImplementedError("the host waits for every operation")


class _StagedWork:
    """Work whose results are copied to the device when it is waited for."""

    def __init__(self, work: Work, copies: Sequence[Tensor], *, into: Sequence[Tensor]) -> None:
        self._work = work
        self._pending = list(zip(copies, into, strict=True))

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> object:
        self._work.wait()
        while self._pending:
            copy, tensor = self._pending.pop()
            # Not seen by autograd, like what NCCL and gloo write.
            tensor.data.copy_(copy)
        return None


def _copy(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach())
