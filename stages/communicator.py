"""What torch's process groups offer of use here, gloo's and NCCL's alike."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Work(Protocol):
    """An operation that is under way."""

    def is_completed(self) -> bool: ...

    def wait(self) -> object:
        """Wait for it; with NCCL it is the device that waits, before what it is given next."""


class Communicator(Protocol):
    """Processes that exchange tensors. Each begins the same operations in the same order."""

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> Work: ...

    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> Work: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> Work: ...

    def broadcast(self, tensor: Tensor, root: int, /) -> Work: ...

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list[int], given_sizes: list[int], /
    ) -> Work: ...
