"""The operations of torch's gloo and NCCL process groups that are used here."""

from __future__ import annotations

from typing import Protocol

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

    def broadcast(self, tensor: Tensor, root: int, /) -> Work: ...

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list[int], given_sizes: list[int], /
    ) -> Work: ...

    def _start_coalescing(self) -> None:
        """NCCL only: operations begun from here on are one, until `_end_coalescing` begins it."""

    def _end_coalescing(self) -> Work: ...
