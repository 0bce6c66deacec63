"""Which GPU and cores a process takes, and all device settings for a pipeline on GPUs, each with its reason.

Variables that are already set are kept; a value that would hang a run is refused.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from schedules.messages import MOST_QUEUES, OWN_QUEUES


class Setting(NamedTuple):
    """An environment variable that CUDA, NCCL or torch reads once, when it starts."""

    name: str
    value: str
    instead: tuple[str, ...] = ()
    """Its older names: if one of them is set, this one is not."""


ENVIRONMENT = (
    # CUDA's own order is by speed; nvidia-smi, SLURM and the launcher number GPUs by bus.
    Setting("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
    # A receive posted ahead occupies the GPU until its message arrives, and a kernel that is loaded lazily
    # may wait until the GPU is idle (CUDA's programming guide, "Lazy Loading").
    Setting("CUDA_MODULE_LOADING", "EAGER"),
    # Streams share hardware queues, 8 by default, and work queued behind an open receive waits for its
    # message. Compute, copies and one communicator per channel and group need more than 8.
    Setting("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
    # Buffers of multicast over NVLink take memory in every communicator; the exchanges here do not use it.
    # NCCL connects per algorithm at first use, which blocks the host: `connect` makes every exchange once.
    Setting("NCCL_NVLS_ENABLE", "0"),
    # Every process asks rank 0 this often whether another one has timed out, by default once a second.
    Setting("TORCH_NCCL_COORD_CHECK_MILSEC", "30000"),
    # Messages of a communicator are to follow each other; torch would warn of it in every process.
    Setting("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0"),
    # Allocation sizes hardly repeat between forwards, backwards and updates. Expandable segments leave no
    # gaps, so the allocator seldom retries, which synchronises the device.
    Setting("PYTORCH_ALLOC_CONF", "expandable_segments:True", ("PYTORCH_CUDA_ALLOC_CONF",)),
)

LINK_CTAS = 4
"""Maximal number of thread blocks (CTAs) of an open receive; NCCL's default is up to 32.

Each occupies an SM, of 100 or more, while it waits. A channel has one open receive at a time, and a rank two
channels, four in a V: 8 or 16 SMs, without which a product that fills the device in one wave takes two. Fewer
blocks send a message more slowly, which hides behind an action where it is as long. Not measured: that needs
two GPUs, on which `NCCL_MAX_CTAS` may bound it further.
"""


STAR_CTAS = 16
"""Maximal number of thread blocks of a communicator between one rank and all others, whose messages of a
micro-batch are one launch: as many blocks as the open receives of a V have together. Not measured."""


class Refused(NamedTuple):
    """A variable, some of whose values hang several ranks on GPUs."""

    name: str
    is_fine: Callable[[str], bool]
    accepted: str
    why: str


LEAST_CONNECTIONS = 8
"""CUDA's default number of hardware queues."""


def _is_off(value: str) -> bool:
    return value.lower() in ("", "0", "false", "no", "n", "f")


REFUSED = (
    Refused("CUDA_LAUNCH_BLOCKING", _is_off, "0", "every launch would wait for open receives"),
    # Torch reads both names.
    *(
        Refused(name, _is_off, "0", "the host would wait for every exchange")
        for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
    ),
    # Megatron's recipes set 1.
    Refused(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        lambda value: value.isdecimal() and int(value) >= LEAST_CONNECTIONS,
        f"{LEAST_CONNECTIONS} to 32",
        "work that is ready would queue behind work that waits for a message",
    ),
    Refused(
        "NCCL_LAUNCH_ORDER_IMPLICIT", _is_off, "0", "a message that is ready would wait for earlier ones"
    ),
    # NVIDIA's images set LAZY.
    Refused(
        "CUDA_MODULE_LOADING",
        lambda value: value.upper() == "EAGER",
        "EAGER",
        "a kernel loaded late may wait for open receives",
    ),
)


class DeviceSettingError(ValueError):
    """An environment variable under which a pipeline cannot run on GPUs."""


def check_environment(environment: Mapping[str, str], *, ranks: int) -> None:
    """Refuse values of environment variables (`REFUSED`) for several ranks on GPUs.

    Raises:
        DeviceSettingError: one is set. The host would wait for the device, and so for a receive posted ahead
            whose message may depend on the next launch.
    """
    for refused in REFUSED if ranks > 1 else ():
        value = environment.get(refused.name)
        if value is not None and not refused.is_fine(value):
            raise DeviceSettingError(
                f"{refused.name} is {value}: the {ranks} ranks of a run would wait for each other forever on "
                f"GPUs, since {refused.why}; accepted: unset, {refused.accepted} (anything for a run of one "
                "rank, and with --replay)"
            )


def check_queues(environment: Mapping[str, str], *, communicators: int) -> None:
    """Refuse a run in which work that is ready could queue behind work that waits for a message.

    Args:
        environment: variables, after `set_environment`.
        communicators: the most that one rank of the run has.

    Raises:
        DeviceSettingError: a GPU has fewer queues, or is allowed fewer.
    """
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    needed, allowed = communicators + OWN_QUEUES, min(int(environment.get(name, MOST_QUEUES)), MOST_QUEUES)
    if needed <= allowed:
        return
    why = f"a rank of this run needs {needed} queues of its GPU, one for each NCCL communicator and two for"
    why += " its own work, or ranks could wait for each other forever"
    if needed > MOST_QUEUES:
        raise DeviceSettingError(
            f"{why}, and CUDA has {MOST_QUEUES}; accepted: fewer parallel.stages, parallel.shard_head: false"
        )
    raise DeviceSettingError(
        f"{why}, and {name} is {environment[name]}; accepted: unset, {needed} to {MOST_QUEUES}"
    )


def set_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that are not set yet; call it before CUDA starts."""
    for setting in ENVIRONMENT:
        if not any(name in environment for name in setting.instead):
            environment.setdefault(setting.name, setting.value)


def set_arithmetic() -> None:
    """Set how GPUs compute, in every process and in replay."""
    # Split-k partial sums of bf16 products would be rounded to bf16.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    # float32 is float32: images may set TF32, which rounds factors to 10 bits.
    torch.set_float32_matmul_precision("highest")


LEAST_FOR_BFLOAT16 = (8, 0)
"""Compute capability from which GPUs of NVIDIA compute in bfloat16: Ampere's."""


def check_precision(device: torch.device, precision: str) -> None:
    """Refuse a precision that a GPU has no arithmetic for: torch's compiler and attention do without it in
    part only.

    Raises:
        DeviceSettingError: it is bfloat16, and the GPU is older than that.
    """
    if device.type != "cuda" or precision != "bfloat16" or torch.version.hip:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_FOR_BFLOAT16:
        name, version = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        raise DeviceSettingError(
            f"train.precision is bfloat16, and {name} (compute capability {version}) does not compute in it; "
            "accepted here: float32, float64"
        )


def set_up_link(options: Any, *, ranks: int) -> None:
    """Set the options of a NCCL communicator that carries messages.

    Args:
        options: a `torch.distributed.ProcessGroupNCCL.Options`.
        ranks: of the communicator.
    """
    options.config.max_ctas = LINK_CTAS if ranks == 2 else STAR_CTAS
    # Messages get SMs before compute, since the other stage waits for them.
    options.is_high_priority_stream = True


def gpu_of(*, rank: int, local_rank: int, local_size: int, data_ranks: int | None, gpus: int) -> int:
    """Number of the GPU of a process.

    Networks join GPUs of one number on all machines (rails). On every second machine a pipeline runs through
    the GPUs in reverse, so its two neighbours on different machines have the same number.

    Args:
        rank: of the process.
        local_rank: its number on its machine.
        local_size: processes on its machine.
        data_ranks: of the run, if those of a stage are neighbours (`stages.config.places`); None: ranks of a
            pipeline are, whose data ranks on other machines have the same number.
        gpus: that the process sees.
    """
    machine, left = divmod(rank - local_rank, local_size)
    if data_ranks is None or machine % 2 == 0 or left or gpus < local_size or local_size % data_ranks:
        return local_rank % gpus
    place, data = divmod(local_rank, data_ranks)
    return (local_size // data_ranks - 1 - place) * data_ranks + data


def run_near(pci_address: str, *, devices: Path = Path("/sys/bus/pci/devices")) -> None:
    """Run this process on those of its cores that are next to a GPU, as far as the system tells (Linux).

    Args:
        pci_address: of the GPU, as in `0000:3b:00.0`.
        devices: the system's folder of PCI devices.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):  # outside Linux there is no affinity
        near = _cores((devices / pci_address / "local_cpulist").read_text())
        # A job's own binding stays: cores outside of it are not ours.
        if cores := os.sched_getaffinity(0) & near:
            os.sched_setaffinity(0, cores)


def _cores(text: str) -> set[int]:
    """The cores of a list such as `0-3,8-11`."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores
