"""What torch's `fully_shard` exchanges, over communicators of the run: it gathers weights and sums gradients.

torch asks for a device mesh, and so for a default process group. Here that group exchanges nothing; all goes
through communicators that are made, connected and aborted as all others of a run. Sums are taken in the order
of ranks, as everywhere: a part goes to its owner from all ranks at once, which sends as much as a ring does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup, HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stages.comm.communicator import Communicator, Work
from stages.comm.process import Process

_SILENT = "silent"
"""Name of the group that exchanges nothing."""


@dataclass(kw_only=True)
class Sharding:
    """The processes that hold the model with this one, and those that hold the same shard of other copies."""

    rank: int
    """Number of this process's shard."""
    size: int
    """Number of shards."""
    process: int
    processes: int
    """Number of processes of the run."""
    mesh: DeviceMesh
    shards: Communicator | None
    """Between the processes that hold the model together; None: one holds all of it."""
    replicas: Communicator | None
    """Between the processes that hold the same shard, in the order of their groups; None: one group."""
    everyone: Communicator | None
    note_wait: Callable[[float, float], None] = lambda began, ended: None
    """Told when the host has waited for torch's exchanges, from when to when, seconds of `time.perf_counter`;
    on a GPU that says nothing, since only a stream waits."""

    def wait_for(self, begin: Callable[[], Work]) -> None:
        """Begin an operation and wait for it."""
        began = time.perf_counter()
        begin().wait()
        self.note_wait(began, time.perf_counter())

    def gather(self, whole: Tensor, part: Tensor) -> None:
        """Write the parts of all shards into `whole`, one after another."""
        if self.shards is None:
            whole.copy_(part)
        else:
            communicator = self.shards
            self.wait_for(lambda: communicator._allgather_base(whole, part))

    def scatter(self, part: Tensor, whole: Tensor) -> None:
        """Write the sum of this shard's part of everybody's `whole` into `part`, added in rank order."""
        if self.shards is None:
            part.copy_(whole)
        else:
            part.copy_(self._sum(self.shards, whole, self.size))

    def add_replicas(self, part: Tensor) -> None:
        """Sum `part` over the copies of the model, in their order, in each of them."""
        assert self.replicas is not None
        communicator, count = self.replicas, self.processes // self.size
        padded = part.new_zeros(-(-part.numel() // count) * count)
        padded[: part.numel()] = part
        own = self._sum(communicator, padded, count)
        self.wait_for(lambda: communicator._allgather_base(padded, own))
        part.copy_(padded[: part.numel()])

    def exchange(self, sent: Tensor, into: Tensor, *, sizes: tuple[Sequence[int], Sequence[int]]) -> None:
        """Send each process its part of `sent`, and receive from each into `into`.

        Args:
            sent: 1-d.
            into: 1-d.
            sizes: by process, what is sent and what is received.
        """
        assert self.everyone is not None
        communicator, (out, back) = self.everyone, sizes
        communicator.alltoall_base(into, sent, list(back), list(out)).wait()

    def _sum(self, communicator: Communicator, whole: Tensor, count: int) -> Tensor:
        received, even = torch.empty_like(whole), [whole.numel() // count] * count
        self.wait_for(lambda: communicator.alltoall_base(received, whole, even, even))
        total, *others = received.view(count, -1).unbind()
        for other in others:
            total.add_(other)
        return total


class Gather:
    """For `FSDPModule.set_custom_all_gather`."""

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        self._sharding.gather(output_tensor, input_tensor)


class Scatter:
    """For `FSDPModule.set_custom_reduce_scatter`."""

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self._sharding.scatter(output_tensor, input_tensor)


def connect_sharding(process: Process, *, name: str, shards: int) -> Sharding:
    """The sharding of this process. All processes call it together.

    Args:
        process: this one.
        name: of the communicators; none has had it before.
        shards: processes that hold the model together; divides their number.
    """
    group, rank = divmod(process.rank, shards)

    def communicator(kind: str, members: Sequence[int]) -> Communicator | None:
        return process.communicator(f"{name} {kind}", members) if len(members) > 1 else None

    return Sharding(
        rank=rank,
        size=shards,
        process=process.rank,
        processes=process.size,
        mesh=silent_mesh(process.device.type, rank=rank, size=shards),
        shards=communicator(f"shards {group}", range(group * shards, (group + 1) * shards)),
        replicas=communicator(f"replicas {rank}", range(rank, process.size, shards)),
        everyone=communicator("matrices", range(process.size)),
    )


def silent_mesh(device: str, *, rank: int, size: int) -> DeviceMesh:
    """torch's picture of the processes that hold the model together, over a group that exchanges nothing.

    Args:
        device: `cpu` or `cuda`.
        rank: of this process among them.
        size: their number.
    """
    if dist.is_initialized():
        dist.destroy_process_group()  # of an earlier run of this process
    # From 2.14 on torch takes rank and size of the group from its backend. One named "fake" it sets up only
    # in part.
    dist.Backend.register_backend(
        _SILENT,
        lambda store, rank, size, timeout: FakeProcessGroup._create_internal(rank, size),
        devices=["cpu", "cuda"],
    )
    # A store of this process alone: nobody is met over it.
    dist.init_process_group(_SILENT, store=HashStore(), rank=rank, world_size=size)  # noqa: TID251
    return init_device_mesh(device, (size,))
