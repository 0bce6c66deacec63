"""What a device can do, for estimates of time: the makers' data sheets, without sparsity."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpp_cli.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU and its share of the network."""

    name: str
    tflops: dict[str, float]
    """Dense peak by precision. float32 is plain float32: torch uses no TF32 unless told to."""
    memory_gb: float
    """10^9 bytes."""
    bandwidth_gbs: float
    """Of its memory, 10^9 bytes a second."""
    network_gbs: float = 50.0
    """To another node, one way: an adapter of 400 Gbit/s a GPU."""
    latency_us: float = 20.0
    """Of a message between stages, from one process to the other."""


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(name="h100", tflops={"bfloat16": 989.4, "float32": 66.9}, memory_gb=80, bandwidth_gbs=3350),
        Device(name="h200", tflops={"bfloat16": 989.4, "float32": 66.9}, memory_gb=141, bandwidth_gbs=4800),
        Device(name="b200", tflops={"bfloat16": 2250.0, "float32": 75.0}, memory_gb=180, bandwidth_gbs=8000),
        Device(
            name="a100",
            tflops={"bfloat16": 312.0, "float32": 19.5},
            memory_gb=80,
            bandwidth_gbs=2039,
            network_gbs=25.0,
        ),
        Device(
            name="l40s",
            tflops={"bfloat16": 362.05, "float32": 91.6},
            memory_gb=48,
            bandwidth_gbs=864,
            network_gbs=12.5,
        ),
    )
}

USABLE = 0.94
"""Share of a device's memory that tensors may take: the rest goes to CUDA's context, kernels and gaps."""


def find_device(name: str, *, key: str) -> Device:
    """The device of that name; `key` says where it was asked for.

    Raises:
        UserError: it is not in the table.
    """
    if name not in DEVICES:
        raise UserError(f"{key}: unknown GPU {name!r}; accepted: {', '.join(DEVICES)}")
    return DEVICES[name]
