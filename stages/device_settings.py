"""How GPUs are set up for a pipeline: every setting in one place, each with its reason.

What the environment says already is left as it is, but for what cannot work.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import torch


class Setting(NamedTuple):
    """A variable of the environment that CUDA, NCCL or torch reads once, when it starts."""

    name: str
    value: str
    instead: tuple[str, ...] = ()
    """Older names of it: where one of them is set, it is left alone."""


ENVIRONMENT = (
    # A receive that is posted ahead occupies the GPU until its message comes, and a kernel that is loaded
    # when it is first needed may wait until the GPU is idle (CUDA's programming guide, "Lazy Loading").
    Setting("CUDA_MODULE_LOADING", "EAGER"),
    # Streams share hardware queues, 8 unless told otherwise: what stands behind an open receive in one of
    # them waits for its message. Compute, copies and a communicator for each channel and group are more than
    # 8.
    Setting("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
    # NCCL connects per algorithm when it first uses one, for which the host waits for the other ranks: in the
    # middle of a segment they may be waiting for this one.
    Setting("NCCL_RUNTIME_CONNECT", "0"),
    # The sizes of what a stage allocates hardly repeat between forwards, backwards and updates. Segments that
    # grow leave no gaps, and an allocation seldom has to be tried again, for which the device is
    # synchronised.
    Setting("PYTORCH_ALLOC_CONF", "expandable_segments:True", ("PYTORCH_CUDA_ALLOC_CONF",)),
)

LINK_CTAS = 4
"""Blocks of an open receive, at most. It occupies as many SMs while it waits, of 100 or more, on each of up
to four channels; NCCL's own choice is up to 32. Chosen from these counts, not measured."""

_REFUSED = "CUDA_LAUNCH_BLOCKING"


class DeviceSettingError(ValueError):
    """A setting of the environment under which a pipeline cannot run on GPUs."""


def check_environment(environment: Mapping[str, str], *, ranks: int) -> None:
    """Refuse what several ranks on GPUs cannot run under.

    Raises:
        DeviceSettingError: every launch would wait for the device, and so for a receive that is posted ahead,
            whose message may depend on what is launched next.
    """
    if ranks > 1 and environment.get(_REFUSED, "0") not in ("", "0"):
        raise DeviceSettingError(
            f"{_REFUSED} is {environment[_REFUSED]}: the {ranks} ranks of a run would wait for each other "
            f"for ever on GPUs; accepted: unset, 0 (a run of one rank, or --replay, can have it)"
        )


def set_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what is not set yet; before CUDA starts."""
    for setting in ENVIRONMENT:
        if not any(name in environment for name in setting.instead):
            environment.setdefault(setting.name, setting.value)


def set_arithmetic() -> None:
    """How a GPU computes, in every process and in replay."""
    # Split-k sums of bf16 products would be rounded to bf16 between the parts.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def set_up_link(options: Any) -> None:
    """Options of a NCCL communicator that carries the messages of one channel.

    Args:
        options: a `torch.distributed.ProcessGroupNCCL.Options`.
    """
    options.config.max_ctas = LINK_CTAS
    # A message's blocks go before those of compute that wait for an SM: the other stage waits for it.
    options.is_high_priority_stream = True
