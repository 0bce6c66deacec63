"""A process of a distributed run: its rank, its device, its communicators, and the rendezvous."""

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
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from stages.comm.communicator import Communicator, FullDuplex, HostStaged, in_background
from stages.comm.device_settings import (
    check_environment,
    gpu_of,
    run_near,
    set_arithmetic,
    set_environment,
    set_up_link,
)
from stages.comm.network import choose_address, set_nccl_interface
from stages.comm.rendezvous.authenticated import make_secret, read_secret
from stages.comm.rendezvous.client import GoneError, GroupStore, HubStore, Meetings, Member
from stages.comm.rendezvous.hub import Hub
from stages.config.places import DATA
from stages.config.run_config import SiteConfig

ADDRESS_FILE = "rendezvous"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Linux's name of a machine since its start; containers on it have the same."""

NCCL_TIMEOUTS = 3
"""NCCL's timeout in multiples of `site.timeout`: the watchdog ends a run after two."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """This process, one of `size` that train a run."""

    rank: int
    size: int
    local_rank: int
    """Rank among the processes on this machine."""
    device: torch.device
    timeout: datetime.timedelta
    start_timeout: datetime.timedelta
    """How long to wait for another process to start."""
    address: str
    """Address of this machine on which its communicators listen."""
    member: Member
    store: Store
    meetings: Meetings
    """Those of the training thread."""
    host_staged: bool
    """Whether messages go through host memory, since processes share a GPU."""
    pids: list[int]
    """Process id of every rank, on its own machine; empty but on rank 0."""
    generations: Iterator[int] = field(default_factory=itertools.count)
    """Numbers the connections made one after another, so that no communicator's name repeats."""
    connected: list[dist.ProcessGroupNCCL] = field(default_factory=list)
    """NCCL communicators to close when the run ends."""
    devices: dict[bool, dist.ProcessGroupGloo.Device] = field(default_factory=dict)
    """gloo devices by whether their communicator connects lazily: the newest of the lazy ones, one for all
    others."""

    stores: list[GroupStore] = field(default_factory=list)
    """Stores of the gloo communicators, which use them later but do not keep the Python objects alive."""

    @property
    def device_waits(self) -> bool:
        """Whether waiting for an exchange blocks the device and not the host, as with NCCL."""
        return self.device.type == "cuda" and not self.host_staged

    def communicator(self, name: str, ranks: Sequence[int]) -> Communicator:
        """A communicator of `ranks`, this one among them. Its members call this with the same name, and all
        processes create the communicators that they share in the same order.

        `torch.distributed.new_group` does not fit: with all ranks taking part its cost grows with the world
        size, and with `use_local_synchronization` it derives the name from the number of groups that each
        member has made, which differs along a pipeline.
        """
        return self._communicator(name, ranks, link=False)

    def link(self, name: str, ranks: Sequence[int]) -> Communicator:
        """A communicator for messages: of two ranks, of which the first sends and the second receives, or of
        one that sends to all others, or receives from them."""
        return self._communicator(name, ranks, link=True)

    def _communicator(self, name: str, ranks: Sequence[int], *, link: bool) -> Communicator:
        rank, size = list(ranks).index(self.rank), len(ranks)
        if self.device.type == "cpu" or self.host_staged:
            addresses = GroupStore(self.member, timeout=self.timeout, name=name, size=size)
            self.stores.append(addresses)
            gloo = dist.ProcessGroupGloo(addresses, rank, size, self._gloo_options(size))
            communicator = cast(Communicator, gloo)
            if not link:
                communicator = FullDuplex(communicator, rank=rank, size=size)
            return HostStaged(communicator) if self.host_staged else communicator
        options: Any = dist.ProcessGroupNCCL.Options()  # its group_name has a private type
        # Counted from when an operation is begun, which for a receive is long before its message is due. This
        # process's own watchdog ends a run earlier, and says what it waited for.
        options._timeout = NCCL_TIMEOUTS * self.timeout
        # Names the entries of NCCL's flight recorder.
        options.group_name = name
        options.global_ranks_in_group = list(ranks)
        if link:
            set_up_link(options, ranks=size)
        nccl = dist.ProcessGroupNCCL(PrefixStore(name, self.store), rank, size, options)
        # Without this the first operation would create the communicator and wait for the other ranks. The
        # connections themselves are made before the first segment (`Links.connect`).
        nccl.eager_connect_single_device(self.device)
        self.connected.append(nccl)
        return cast(Communicator, nccl)

    def close(self, *, failed: bool) -> None:
        """Shut down the NCCL communicators; abort them after a failure, or the device would wait forever for
        a process that is gone."""
        if failed:
            abort_together(self.connected)
        else:
            for nccl in self.connected:
                nccl.shutdown()
        self.connected.clear()

    def _gloo_options(self, size: int) -> Any:
        # A pair connects at once, since its first message would wait for the other end. Members of a larger
        # group connect to those they exchange something with.
        lazy = size > 2
        # A second lazily connecting communicator on the same device hangs.
        if lazy or lazy not in self.devices:
            self.devices[lazy] = dist.ProcessGroupGloo.create_device(hostname=self.address, lazy_init=lazy)
        options: Any = getattr(dist.ProcessGroupGloo, "_Options")()  # noqa: B009  # not in torch's type stubs
        options._devices = [self.devices[lazy]]
        options._timeout = self.timeout
        return options


SECONDS_TO_ABORT = 10.0
"""Time for NCCL to end what it does; the process then ends without."""


def abort_together(communicators: Sequence[Any]) -> None:
    """Abort NCCL communicators at the same time, whatever state each is in.

    One by one, an abort may wait for a kernel of the next communicator (NCCL's issue 1013, PyTorch's 119797).
    A group of NCCL's around the calls would not do: torch aborts in a thread of its own, and groups are a
    thread's.
    """
    aborts = [in_background(nccl.abort, name="abort") for nccl in communicators]
    futures.wait(aborts, timeout=SECONDS_TO_ABORT)


def choose_device(
    site: SiteConfig, *, rank: int = 0, local_rank: int = 0, local_size: int = 1, data_ranks: int = 1
) -> torch.device:
    """The device that a process computes on (`stages.comm.device_settings`).

    Raises:
        RuntimeError: `site.device` is `cuda` and no GPU is available.
    """
    available = torch.cuda.is_available()
    if site.device == "cuda" and not available:
        built = torch.version.cuda or getattr(torch.version, "hip", None)
        why = "torch finds no GPU here" if built else "this torch is built without CUDA"
        raise RuntimeError(f"site.device is cuda, but {why}; accepted: auto, cpu")
    if site.device == "cpu" or not available:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if site.device == "auto" and visible not in ("", "-1") and local_rank == 0:
            print(
                f"site.device is auto and CUDA_VISIBLE_DEVICES {visible}, but torch {torch.__version__} "
                "finds no GPU: this run trains on the CPU",
                file=sys.stderr,
            )
        return torch.device("cpu")
    set_arithmetic()
    gpu = gpu_of(
        rank=rank,
        local_rank=local_rank,
        local_size=local_size,
        data_ranks=data_ranks if site.neighbours == DATA else None,
        gpus=torch.cuda.device_count(),
    )
    return torch.device("cuda", gpu)


@contextmanager
def connected(
    *,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    rendezvous: Path,
    site: SiteConfig,
    data_ranks: int = 1,
) -> Iterator[Process]:
    """Connect to the other processes of the run; disconnect at the end of the block.

    Rank 0 listens on a free port and writes its address into `rendezvous`, a folder of this attempt that all
    ranks see, beside a secret that only the run's owner can read. So runs never meet on one port, and no
    foreign process takes part (docs/security.md).

    Args:
        rank: of this process, 0 .. size - 1.
        size: number of processes.
        local_rank: of this process on its machine; chooses the GPU.
        local_size: processes of the run on this machine; if all of them, only the loopback address is used.
        rendezvous: folder of this attempt.
        site: device and timeouts.
        data_ranks: of the run; with the ranks, it decides which GPU this process takes.

    Raises:
        DeviceSettingError: an environment variable is set under which several ranks on GPUs hang.
        GoneError: a process did not join within `site.start_timeout` seconds.
        PermissionError: the folder's permissions do not keep a secret.
    """
    if site.device != "cpu":
        set_environment()
    device = choose_device(
        site, rank=rank, local_rank=local_rank, local_size=local_size, data_ranks=data_ranks
    )
    if device.type == "cuda":
        _take(device, size=size, local_size=local_size)
    _raise_open_files()
    alone = local_size == size
    address = choose_address(alone=alone)
    set_nccl_interface(alone=alone)
    timeout = datetime.timedelta(seconds=site.timeout)
    failure: str | None = "it was ended"
    with _joined(
        rank=rank, size=size, address=address, folder=rendezvous, timeout=site.start_timeout
    ) as member:
        process = None
        try:
            meetings = Meetings(member, "training", seconds=site.timeout)
            everyone = meetings.gather([os.getpid(), _gpu(device)], to=0, seconds=site.start_timeout)
            gpus = {str(gpu) for _, gpu in everyone}
            [shared] = meetings.first(len(gpus) < size if everyone else None)
            process = Process(
                rank=rank,
                size=size,
                local_rank=local_rank,
                device=device,
                timeout=timeout,
                start_timeout=datetime.timedelta(seconds=site.start_timeout),
                address=address,
                member=member,
                store=HubStore(member, timeout=timeout),
                meetings=meetings,
                host_staged=device.type == "cuda" and shared,
                pids=[pid for pid, _ in everyone],
            )
            if process.host_staged and rank == 0:
                print(_SHARED_GPU, file=sys.stderr)
            yield process
            failure = None
        except Exception as error:
            failure = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise
        finally:
            if process is not None and failure is None:
                process.close(failed=False)
            # The others learn of a failure before NCCL has ended what it does, which may take its time.
            member.close(failure=failure)
            if process is not None and failure is not None:
                process.close(failed=True)


_SHARED_GPU = (
    "processes of this run share a GPU: their messages go through host memory, which is for "
    "trying a run out, not for measuring; for full speed start one process per GPU"
)


def _take(device: torch.device, *, size: int, local_size: int) -> None:
    """Make a GPU that of this process, which runs on the processors near it."""
    check_environment(os.environ, ranks=size)
    torch.cuda.set_device(device)
    if local_size > 1:
        run_near(_pci_address(device))


def _raise_open_files() -> None:
    """Raise the soft limit of open files to the hard one: each connection is a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS has a lower bound than it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _gpu(device: torch.device) -> list[str] | None:
    """Machine and address of a GPU, by which NCCL tells GPUs apart; None for a CPU.

    Parts of one GPU (MIG) have one address, and NCCL refuses two of them, though each has its own UUID.
    """
    if device.type != "cuda":
        return None
    boot = ""
    with contextlib.suppress(OSError):
        boot = BOOT_ID.read_text().strip()
    return [f"{socket.gethostname()} {boot}", _pci_address(device)]


def _pci_address(device: torch.device) -> str:
    """A GPU's address on the PCI bus, such as `0000:3b:00.0`."""
    gpu: Any = torch.cuda.get_device_properties(device)  # torch's annotations lack the address
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


@contextmanager
def _joined(*, rank: int, size: int, address: str, folder: Path, timeout: float) -> Iterator[Member]:
    """This process's connection to the hub, which runs in rank 0's process."""
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
        pause = min(1.5 * pause, 0.5)  # thousands of ranks may look at this file

    host, _, port = file.read_text().rpartition(":")
    return host, int(port)
