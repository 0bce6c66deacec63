"""One process of a pipeline: its rank, its device, and how it finds the others."""

from __future__ import annotations

import datetime
import fcntl
import itertools
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import ProcessGroup

from stages.communicator import Communicator
from stages.config import SiteConfig
from stages.device_settings import check_environment, set_arithmetic, set_environment, set_up_link
from stages.through_host import ThroughHost

ADDRESS_FILE = "rendezvous"
_SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface (netdevice(7))."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """This process among those of its run."""

    rank: int
    size: int
    device: torch.device
    timeout: datetime.timedelta
    store: Store
    through_host: bool
    """Whether messages go through the host's memory, since processes share a GPU."""
    generations: Iterator[int] = field(default_factory=itertools.count)
    """Numbers the pipelines that these processes form one after another: no communicator's name may come
    twice."""
    connected: list[dist.ProcessGroupNCCL] = field(default_factory=list)
    """What is to be closed when the run ends."""

    @property
    def device_waits(self) -> bool:
        """Whether to wait for an exchange holds up the device and not the host, as with NCCL."""
        return self.device.type == "cuda" and not self.through_host

    def communicator(self, name: str, ranks: Sequence[int]) -> Communicator:
        """A communicator of `ranks`, this one among them; its members call this with the same name, and wait
        here for each other. So all processes make those that they share in one order.

        `torch.distributed.new_group` is no way to it: with every rank taking part its cost grows with the
        world, and with `use_local_synchronization` it derives the name from how many groups each member has
        made before, which differs between the ends and the middle of a pipeline.
        """
        return self._communicator(name, ranks, link=False)

    def link(self, name: str, ranks: Sequence[int]) -> Communicator:
        """As `communicator`, of two ranks, of which the first one sends and the second one receives."""
        return self._communicator(name, ranks, link=True)

    def _communicator(self, name: str, ranks: Sequence[int], *, link: bool) -> Communicator:
        store = PrefixStore(name, self.store)
        rank = list(ranks).index(self.rank)
        if self.device.type == "cpu" or self.through_host:
            gloo = cast(Communicator, dist.ProcessGroupGloo(store, rank, len(ranks), self.timeout))
            return ThroughHost(gloo) if self.through_host else gloo
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        if link:
            set_up_link(options)
        nccl = dist.ProcessGroupNCCL(store, rank, len(ranks), options)
        # Otherwise its first operation would make it, and wait for the other ranks. This makes the
        # communicator alone; what it connects when it is first used is connected before the first segment
        # (`stages.warm_up`).
        nccl.eager_connect_single_device(self.device)
        self.connected.append(nccl)
        return cast(Communicator, nccl)

    def close(self, *, failed: bool) -> None:
        """Give up the communicators. After a failure what they were about is cut off: the device would wait
        for ever for a process that is gone, and the end of this one for the device."""
        for nccl in self.connected:
            if failed:
                nccl.abort()
            else:
                nccl.shutdown()
        self.connected.clear()

    def gather(self, mine: Any, *, group: ProcessGroup | None = None) -> list[Any]:
        """What every rank brought, in the order of the ranks. A meeting of all ranks: for drains only.

        Args:
            mine: what this rank brings.
            group: that the meeting goes over; None: the one of the thread that trains.
        """
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, mine, group=group)
        return everyone

    def group(self, *, timeout: datetime.timedelta) -> ProcessGroup:
        """A group of all ranks for meetings in another thread; all ranks call this together.

        Two threads must not use one communicator: what the ranks meet for could differ from rank to rank.
        """
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, ProcessGroup)
        return group


def choose_device(site: SiteConfig, *, local_rank: int = 0) -> torch.device:
    """The device that a process computes on.

    Raises:
        RuntimeError: `site.device` is `cuda` and there is none.
    """
    available = torch.cuda.is_available()
    if site.device == "cuda" and not available:
        built = torch.version.cuda or getattr(torch.version, "hip", None)
        why = "torch finds no GPU here" if built else "this torch is built without CUDA"
        raise RuntimeError(f"site.device is cuda, but {why}; accepted: auto, cpu")
    if site.device == "cpu" or not available:
        return torch.device("cpu")
    set_arithmetic()
    return torch.device("cuda", local_rank % torch.cuda.device_count())


@contextmanager
def connected(
    *, rank: int, size: int, local_rank: int, local_size: int, rendezvous: Path, site: SiteConfig
) -> Iterator[Process]:
    """Join the other processes of the run; leave them at the end.

    Rank 0 opens a store on a port that the system chooses and writes its address into `rendezvous`, a folder
    of this attempt alone that all ranks can see: so no two runs ever meet on one port.

    Args:
        rank: of this process, 0 .. size - 1.
        size: number of processes.
        local_rank: of this process on its machine; chooses the GPU.
        local_size: processes of the run on this machine. Where that is all of them, only the loopback address
            is used.
        rendezvous: folder of this attempt.

    Raises:
        DeviceSettingError: several ranks on GPUs cannot run under a setting of the environment.
        TimeoutError: rank 0 left no address within `site.timeout` seconds.
    """
    if site.device != "cpu":
        set_environment()
    device = choose_device(site, local_rank=local_rank)
    if device.type == "cuda":
        check_environment(os.environ, ranks=size)
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=site.timeout)
    host = "127.0.0.1" if local_size == size else _own_address()
    if local_size == size and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = _open_store(rank=rank, size=size, host=host, rendezvous=rendezvous, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    process = Process(
        rank=rank,
        size=size,
        device=device,
        timeout=timeout,
        store=store,
        through_host=device.type == "cuda" and _share_a_gpu(device, size=size),
    )
    failed = True
    try:
        yield process
        failed = False
    finally:
        process.close(failed=failed)
        dist.destroy_process_group()


def _share_a_gpu(device: torch.device, *, size: int) -> bool:
    """Whether any two processes of the run compute on the same one. All call this together."""
    mine = (socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid))
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, mine)
    return len(set(everyone)) < size


def _own_address() -> str:
    """Where processes on other machines reach this one: by the interface that gloo is told to use, if any."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if not interface or sys.platform != "linux":
        return socket.getfqdn()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            raise RuntimeError(
                f"GLOO_SOCKET_IFNAME is {interface}, and there is no such network interface with an IPv4 "
                f"address here ({error.strerror}); accepted: {', '.join(n for _, n in socket.if_nameindex())}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _open_store(*, rank: int, size: int, host: str, rendezvous: Path, timeout: datetime.timedelta) -> Store:
    address_file = rendezvous / ADDRESS_FILE
    if rank == 0:
        store = TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        rendezvous.mkdir(parents=True, exist_ok=True)
        unfinished = address_file.with_suffix(".writing")
        unfinished.write_text(f"{host}:{store.port}")
        unfinished.replace(address_file)
        return store
    deadline = time.monotonic() + timeout.total_seconds()
    while not address_file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank 0 left no address in {address_file} within {timeout.total_seconds():g} s"
            )
        time.sleep(0.02)
    host, _, port = address_file.read_text().rpartition(":")
    return TCPStore(host, int(port), size, is_master=False, timeout=timeout, wait_for_workers=False)
