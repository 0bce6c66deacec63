"""Peak rates of GPUs, from their data sheets (dense, without sparsity)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncpp_cli.base.errors import UserError
from stages.config.keys import unknown

PEAK_TFLOPS: Mapping[str, Mapping[str, float]] = {
    "B200": {"bfloat16": 2250.0, "float32": 75.0},
    "GH200": {"bfloat16": 989.4, "float32": 66.9},
    "H200 NVL": {"bfloat16": 835.5, "float32": 60.0},
    "H200": {"bfloat16": 989.4, "float32": 66.9},
    "H100 PCIe": {"bfloat16": 756.0, "float32": 51.2},
    "H100 NVL": {"bfloat16": 835.5, "float32": 60.0},
    "H100": {"bfloat16": 989.4, "float32": 66.9},
    "A100": {"bfloat16": 312.0, "float32": 19.5},
    "L40S": {"bfloat16": 362.05, "float32": 91.6},
    "L4": {"bfloat16": 121.0, "float32": 30.3},
    "A10": {"bfloat16": 125.0, "float32": 31.2},
    "MI300X": {"bfloat16": 1307.4, "float32": 163.4},
}
"""Dense peak of a device by a part of its name, in TFLOP/s: the makers' data sheets, without sparsity.

The first match counts. float32 is plain float32: torch uses no TF32 by default.
"""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU and its share of the network."""

    name: str
    tflops: Mapping[str, float]
    """Dense peak by precision. float32 is not TF32, which torch leaves off by default."""
    memory_gb: float
    """Memory, 10^9 bytes."""
    bandwidth_gbs: float
    """Memory bandwidth, 10^9 bytes per second."""
    network_gbs: float = 50.0
    """Network bandwidth to another node in one direction, 10^9 bytes per second: by default one 400 Gbit/s
    adapter per GPU."""
    link_gbs: float = 32.0
    """Bandwidth to another GPU of the node in one direction, 10^9 bytes per second: by default PCIe 4.0."""
    node_gpus: int = 8
    """GPUs of a node."""
    shares_adapter: bool = False
    """Whether a node has one adapter, of whose rate `network_gbs` is the share of each of its GPUs; otherwise
    each GPU has its own."""
    matrix_share: float = 0.65
    """Share of the peak that large matrix products reach. Of an H100 and an A100, as the next, it fits the
    published speeds in docs/plan.md; of others it is a guess."""
    attention_share: float = 0.3
    """Share of the peak that attention reaches: FlashAttention-2 has 35 % of an H100's in a long forward
    (arXiv 2407.08608), less in a backward and at a few thousand tokens."""
    latency_us: float = 20.0
    """Latency of a message from one process to another, microseconds."""

    @property
    def usable_gb(self) -> float:
        """Memory for what is planned, 10^9 bytes: without CUDA's context and what stays free."""
        return self.memory_gb * (1 - FREE_SHARE) - CONTEXT_GB


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="h100",
            tflops=PEAK_TFLOPS["H100"],
            memory_gb=80,
            bandwidth_gbs=3350,
            link_gbs=450,
            matrix_share=0.75,
            attention_share=0.25,
        ),
        Device(
            name="h200",
            tflops=PEAK_TFLOPS["H200"],
            memory_gb=141,
            bandwidth_gbs=4800,
            link_gbs=450,
            matrix_share=0.75,
            attention_share=0.25,
        ),
        Device(name="b200", tflops=PEAK_TFLOPS["B200"], memory_gb=180, bandwidth_gbs=8000, link_gbs=900),
        Device(
            name="a100",
            tflops=PEAK_TFLOPS["A100"],
            memory_gb=80,
            bandwidth_gbs=2039,
            link_gbs=300,
            matrix_share=0.79,
            attention_share=0.49,
            network_gbs=25.0,
        ),
        Device(
            name="l40s",
            tflops=PEAK_TFLOPS["L40S"],
            memory_gb=48,
            bandwidth_gbs=864,
            network_gbs=12.5,
        ),
    )
}

CONTEXT_GB = 0.56
"""CUDA's context, 10^9 bytes: 557 MB on an H100 with modules loaded at the start
(benchmarks/results/h100-2026-11-26.md)."""
FREE_SHARE = 0.04
"""Share of a device's memory that a plan leaves free, for what it does not know."""


def find_device(name: str, *, key: str) -> Device:
    """The device called `name`.

    Args:
        name: a key of `DEVICES`.
        key: the setting that names the device, for the message.

    Raises:
        UserError: `name` is not in `DEVICES`.
    """
    if name not in DEVICES:
        raise UserError(f"{key}: {unknown(name, DEVICES)}")
    return DEVICES[name]


def peak_tflops(device: str, precision: str) -> float | None:
    """Peak of a device by its name, in TFLOP/s; None if it is not in the table."""
    words = device.replace("-", " ").upper()
    for name, peaks in PEAK_TFLOPS.items():
        # Whole words: an L40 is no L4, and an A100 no A10.
        if f" {name.upper()} " in f" {words} ":
            return peaks.get(precision)
    return None
