"""The operations of torch's gloo and NCCL process groups that are used here, and two forms of gloo's.

`FullDuplex` sends in both directions at once. gloo's own alltoall and broadcasts offer to receive after they
have begun to send. The offer then waits behind what is sent, so that a link between two data ranks carries
their data one way after the other.

`HostStaged` sends GPU tensors through host memory, between processes that share a GPU, which NCCL refuses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor


class Work(Protocol):
    """An operation in progress."""

    def is_completed(self) -> bool: ...

    def wait(self) -> object:
        """Wait for it; with NCCL the device waits, before work launched later."""


class Communicator(Protocol):
    """A process group. All members begin the same operations in the same order."""

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> Work: ...

    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> Work: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> Work: ...

    def _allgather_base(self, output: Tensor, given: Tensor, /) -> Work: ...

    def broadcast(self, tensor: Tensor, root: int, /) -> Work: ...

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list[int], given_sizes: list[int], /
    ) -> Work: ...


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
        self._allgather_base = gloo._allgather_base
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


class _Waited:
    """Messages of gloo, which are completed only by waiting for them: a thread of this work does."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._all = in_background(lambda: [work.wait() for work in works], name="exchange")
        self.is_completed = self._all.done
        self.wait = self._all.result


def in_background(work: Callable[[], object], *, name: str) -> Future[object]:
    """Call `work` in a daemon thread of this name."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future


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

    def _allgather_base(self, output: Tensor, given: Tensor, /) -> Work:
        copy = _copy(output)
        return _StagedWork(self._host._allgather_base(copy, _copy(given)), [copy], into=[output])

    def broadcast(self, tensor: Tensor, root: int, /) -> Work:
        copy = _copy(tensor)
        return _StagedWork(self._host.broadcast(copy, root), [copy], into=[tensor])

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list[int], given_sizes: list[int], /
    ) -> Work:
        copy = _copy(output)
        work = self._host.alltoall_base(copy, _copy(given), output_sizes, given_sizes)
        return _StagedWork(work, [copy], into=[output])


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
