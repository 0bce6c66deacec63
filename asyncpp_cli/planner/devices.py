"""Peak rates of GPUs, from their data sheets (dense, without sparsity)."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpp_cli.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU and its share of the network."""

    name: str
    tflops: dict[str, float]
    """Dense peak by precision. float32 is not TF32, which torch leaves off by default."""
    memory_gb: float
    """Memory, 10^9 bytes."""
    bandwidth_gbs: float
    """Memory bandwidth, 10^9 bytes per second."""
    network_gbs: float = 50.0
    """Network bandwidth to another node in one direction, 10^9 bytes per second: by default one 400 Gbit/s
    adapter per GPU."""
    latency_us: float = 20.0
    """Latency of a message from one process to another, microseconds."""


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
"""Share of a device's memory for tensors; CUDA's context, kernels and fragmentation take the rest."""


def find_device(name: str, *, key: str) -> Device:
    """The device called `name`.

    Args:
        name: a key of `DEVICES`.
        key: the setting that names the device, for the message.

    Raises:
        UserError: `name` is not in `DEVICES`.
    """
    if name not in DEVICES:
        raise UserError(f"{key}: unknown GPU {name!r}; accepted: {', '.join(DEVICES)}")
    return DEVICES[name]
