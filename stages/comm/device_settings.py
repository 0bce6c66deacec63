"""All device settings for a pipeline on GPUs, each with its reason.

Variables that are already set are kept; one that would hang a run is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import torch


class Setting(NamedTuple):
    """An environment variable that CUDA, NCCL or torch reads once, when it starts."""

    name: str
    value: str
    instead: tuple[str, ...] = ()
    """Its older names: if one of them is set, this one is not."""


ENVIRONMENT = (
    # A receive posted ahead occupies the GPU until its message arrives, and a kernel that is loaded lazily
    # may wait until the GPU is idle (CUDA's programming guide, "Lazy Loading").
    Setting("CUDA_MODULE_LOADING", "EAGER"),
    # Streams share hardware queues, 8 by default, and work queued behind an open receive waits for its
    # message. Compute, copies and one communicator per channel and group need more than 8.
    Setting("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
    # NCCL connects per algorithm at first use, which blocks the host until the other ranks do the same:
    # within a segment they may be waiting for this rank.
    Setting("NCCL_RUNTIME_CONNECT", "0"),
    # Allocation sizes hardly repeat between forwards, backwards and updates. Expandable segments leave no
    # gaps, so the allocator seldom retries, which synchronises the device.
    Setting("PYTORCH_ALLOC_CONF", "expandable_segments:True", ("PYTORCH_CUDA_ALLOC_CONF",)),
)

LINK_CTAS = 4
"""Maximal number of thread blocks (CTAs) of an open receive. Each occupies an SM, of 100 or more, while it
waits, on up to four channels; NCCL's default is up to 32. Chosen from these counts, not measured."""

_REFUSED = "CUDA_LAUNCH_BLOCKING"


class DeviceSettingError(ValueError):
    """An environment variable under which a pipeline cannot run on GPUs."""


def check_environment(environment: Mapping[str, str], *, ranks: int) -> None:
    """Refuse CUDA_LAUNCH_BLOCKING=1 for several ranks on GPUs.

    Raises:
        DeviceSettingError: it is set. Every launch would wait for the device, and so for a receive posted
            ahead whose message may depend on the next launch.
    """
    if ranks > 1 and environment.get(_REFUSED, "0") not in ("", "0"):
        raise DeviceSettingError(
            f"{_REFUSED} is {environment[_REFUSED]}: the {ranks} ranks of a run would wait for each other "
            f"forever on GPUs; accepted: unset, 0 (allowed for a run of one rank, and with --replay)"
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


def set_up_link(options: Any) -> None:
    """Set the options of a NCCL communicator that carries one channel.

    Args:
        options: a `torch.distributed.ProcessGroupNCCL.Options`.
    """
    options.config.max_ctas = LINK_CTAS
    # Messages get SMs before compute, since the other stage waits for them.
    options.is_high_priority_stream = True
