"""One process of a pipeline: its rank, its device, and how it finds the others."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from stages.authenticated import Json, make_secret, read_secret
from stages.communicator import Communicator
from stages.config import SiteConfig
from stages.device_settings import check_environment, set_arithmetic, set_environment, set_up_link
from stages.hub import Hub
from stages.member import GoneError, HubStore, Meetings, Member
from stages.network import choose_address, keep_nccl_to
from stages.through_host import ThroughHost

ADDRESS_FILE = "rendezvous"


@dataclass(frozen=True, kw_only=True)
class Process:
    """This process among those of its run."""

    rank: int
    size: int
    device: torch.device
    timeout: datetime.timedelta
    start_timeout: datetime.timedelta
    """How long another process may take to begin."""
    address: str
    """Of this machine, that its communicators listen on."""
    member: Member
    store: Store
    meetings: Meetings
    """Of the thread that trains."""
    through_host: bool
    """Whether messages go through the host's memory, since processes share a GPU."""
    generations: Iterator[int] = field(default_factory=itertools.count)
    """Numbers the pipelines that these processes form one after another: no communicator's name may come
    twice."""
    connected: list[dist.ProcessGroupNCCL] = field(default_factory=list)
    """What is to be closed when the run ends."""
    devices: dict[bool, dist.ProcessGroupGloo.Device] = field(default_factory=dict)
    """What gloo listens with, by whether a communicator connects when first used: the newest of those that
    do, one for all others."""

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
            gloo = cast(
                Communicator, dist.ProcessGroupGloo(store, rank, len(ranks), self._gloo_options(len(ranks)))
            )
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

    def _gloo_options(self, size: int) -> Any:
        # Two connect at once: a first message between them would wait for the other end. Of more, those who
        # have something to exchange connect when they do.
        lazy = size > 2
        # Communicators that connect lazily and share a device wait for ever, where two are used by several.
        if lazy or lazy not in self.devices:
            self.devices[lazy] = dist.ProcessGroupGloo.create_device(hostname=self.address, lazy_init=lazy)
        options: Any = getattr(dist.ProcessGroupGloo, "_Options")()  # noqa: B009  # not in torch's type stubs
        options._devices = [self.devices[lazy]]
        options._timeout = self.timeout
        return options

    def gather(self, mine: Json, *, to: int | None = None) -> list[Json]:
        """What every rank brought, in the order of the ranks: see `Meetings.gather`. For drains only."""
        return self.meetings.gather(mine, to=to)


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

    Rank 0 listens on a port that the system chooses, and writes its address into `rendezvous`, a folder of
    this attempt alone that all ranks can see, beside a secret that only the run's owner can read: so no two
    runs ever meet on one port, and nobody else takes part (docs/security.md).

    Args:
        rank: of this process, 0 .. size - 1.
        size: number of processes.
        local_rank: of this process on its machine; chooses the GPU.
        local_size: processes of the run on this machine. Where that is all of them, only the loopback address
            is used.
        rendezvous: folder of this attempt.

    Raises:
        DeviceSettingError: several ranks on GPUs cannot run under a setting of the environment.
        GoneError: a process did not come within `site.start_timeout` seconds.
        PermissionError: the folder cannot keep a secret.
    """
    if site.device != "cpu":
        set_environment()
    device = choose_device(site, local_rank=local_rank)
    if device.type == "cuda":
        check_environment(os.environ, ranks=size)
        torch.cuda.set_device(device)
    _raise_open_files()
    alone = local_size == size
    address = choose_address(alone=alone)
    keep_nccl_to(alone=alone)
    timeout = datetime.timedelta(seconds=site.timeout)
    failure: str | None = "it was ended"
    with _joined(
        rank=rank, size=size, address=address, folder=rendezvous, timeout=site.start_timeout
    ) as member:
        process = None
        try:
            meetings = Meetings(member, "training", seconds=site.timeout)
            gpus = meetings.gather(_gpu(device), to=0, seconds=site.start_timeout)
            [shared] = meetings.first(len(set(map(str, gpus))) < size if gpus else None)
            process = Process(
                rank=rank,
                size=size,
                device=device,
                timeout=timeout,
                start_timeout=datetime.timedelta(seconds=site.start_timeout),
                address=address,
                member=member,
                store=HubStore(member, timeout=timeout),
                meetings=meetings,
                through_host=device.type == "cuda" and shared,
            )
            if process.through_host and rank == 0:
                print(
                    "processes of this run share a GPU: what they send goes through the host's memory, to "
                    "try a run out and not to measure it; for full speed start one process a GPU",
                    file=sys.stderr,
                )
            yield process
            failure = None
        except Exception as error:
            failure = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise
        finally:
            if process is not None:
                process.close(failed=failure is not None)
            member.close(failure=failure)


def _raise_open_files() -> None:
    """Let this process open as many files as the system lets it: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # as on macOS, where the bound is another one
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _gpu(device: torch.device) -> list[str] | None:
    """What tells the device that a process computes on from those of others."""
    if device.type != "cuda":
        return None
    return [socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)]


@contextmanager
def _joined(*, rank: int, size: int, address: str, folder: Path, timeout: float) -> Iterator[Member]:
    """This process's connection to the hub, which is in rank 0's."""
    if rank > 0:
        host, port = _wait_for_address(folder / ADDRESS_FILE, timeout=timeout)
        yield Member(host, port, rank=rank, secret=read_secret(folder), timeout=timeout)
        return
    secret = make_secret(folder)
    hub = Hub(address, size=size, secret=secret)
    failed = True
    try:
        unfinished = folder / f"{ADDRESS_FILE}.writing"
        unfinished.write_text(f"{address}:{hub.port}")
        unfinished.replace(folder / ADDRESS_FILE)
        yield Member(address, hub.port, rank=rank, secret=secret, timeout=timeout)
        failed = False
    finally:
        hub.close(failed=failed)


def _wait_for_address(file: Path, *, timeout: float) -> tuple[str, int]:
    deadline = time.monotonic() + timeout
    pause = 0.01
    while not file.exists():
        if time.monotonic() > deadline:
            raise GoneError(f"rank 0 left no address in {file} within {timeout:g} s")
        time.sleep(pause)
        pause = min(1.5 * pause, 0.5)  # of thousands of ranks that look at one file
    host, _, port = file.read_text().rpartition(":")
    return host, int(port)
