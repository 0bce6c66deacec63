"""Peak rates of GPUs, from their data sheets (dense, without sparsity)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
    "RTX 4090": {"bfloat16": 165.2, "float32": 82.6},
    "RTX 3090": {"bfloat16": 71.0, "float32": 35.6},
    "RTX A6000": {"bfloat16": 154.8, "float32": 38.7},
    "V100": {"bfloat16": 15.7, "float32": 15.7},
}
"""Dense peak of a device by a part of its name, in TFLOP/s: the makers' data sheets, without sparsity.

The first match counts. float32 is plain float32: torch uses no TF32 by default. Products in bfloat16 sum in
float32, which GeForce cards do at half of their rate in float16. A V100 has no units for bfloat16, and has
the rate of its float32.
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
    gpus_per_node: int = 8
    """GPUs of a node."""
    shares_adapter: bool = False
    """Whether a node has one adapter, of whose rate `network_gbs` is the share of each of its GPUs; otherwise
    each GPU has its own."""
    matrix_share: float = 0.65
    """Share of the peak that large matrix products reach. Of an H100 and an A100, as the next, it fits the
    published speeds in docs/plan.md; of others it is a guess."""
    attention_share: float = 0.3
    """Share of the peak that attention reaches in a forward and a backward of thousands of tokens: 286
    TFLOP/s of an H100 by FlashAttention-2 (8,192 tokens; Dao-AILab/flash-attention, pull request 1791), 50 to
    73 % of an A100 (arXiv 2307.08691). Of others it is a guess."""
    latency_us: float = 20.0
    """Latency of a message from one process to another, microseconds."""

    @property
    def usable_gb(self) -> float:
        """Memory for what is planned, 10^9 bytes: without CUDA's context and what stays free."""
        return self.memory_gb * (1 - FREE_SHARE) - CONTEXT_GB

    @property
    def node_gbs(self) -> float:
        """Network bandwidth of a node, 10^9 bytes per second."""
        return self.network_gbs * self.gpus_per_node

    def in_nodes(self, gpus: int) -> Device:
        """This GPU in nodes of so many; an adapter that is a node's has the same rate."""
        rate = self.node_gbs / gpus if self.shares_adapter else self.network_gbs
        return replace(self, gpus_per_node=gpus, network_gbs=rate)


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="h100",
            tflops=PEAK_TFLOPS["H100"],
            memory_gb=80,
            bandwidth_gbs=3350,
            link_gbs=450,
            matrix_share=0.78,
            attention_share=0.29,
        ),
        Device(
            name="h200",
            tflops=PEAK_TFLOPS["H200"],
            memory_gb=141,
            bandwidth_gbs=4800,
            link_gbs=450,
            matrix_share=0.78,
            attention_share=0.29,
        ),
        Device(name="b200", tflops=PEAK_TFLOPS["B200"], memory_gb=180, bandwidth_gbs=8000, link_gbs=900),
        Device(
            name="a100",
            tflops=PEAK_TFLOPS["A100"],
            memory_gb=80,
            bandwidth_gbs=2039,
            link_gbs=300,
            matrix_share=0.8,
            attention_share=0.6,
            network_gbs=25.0,
        ),
        # NVIDIA's data sheet of the L40S (2023): 362.05 TFLOP/s, 48 GB, 864 GB/s, PCIe 4.0.
        Device(name="l40s", tflops=PEAK_TFLOPS["L40S"], memory_gb=48, bandwidth_gbs=864, network_gbs=12.5),
        # NVIDIA's data sheet of the L4 (2023): 242 TFLOP/s with sparsity, 24 GB, 300 GB/s, PCIe 4.0.
        Device(name="l4", tflops=PEAK_TFLOPS["L4"], memory_gb=24, bandwidth_gbs=300, network_gbs=12.5),
        # NVIDIA's data sheet of the A10 (2021, a10-datasheet.pdf): 125 TFLOP/s, in float32 31.2; 24 GB,
        # 600 GB/s, PCIe 4.0. NVIDIA/NeMo has the same peaks (speed_monitor.py).
        Device(name="a10", tflops=PEAK_TFLOPS["A10"], memory_gb=24, bandwidth_gbs=600, network_gbs=12.5),
        # NVIDIA's paper on the GA102 (ampere-ga-102-gpu-architecture-whitepaper-v2.pdf), table 3, and its
        # data sheet of the RTX A6000 (2020): 154.8 TFLOP/s, with sparsity 309.7; 48 GB, 768 GB/s, PCIe 4.0.
        # Bridges of NVLink, which join two, are not counted.
        Device(
            name="a6000", tflops=PEAK_TFLOPS["RTX A6000"], memory_gb=48, bandwidth_gbs=768, network_gbs=12.5
        ),
        # NVIDIA's data sheet of the V100 (2020, volta-v100-datasheet-update-us-1165301-r5.pdf), SXM2: 15.7
        # TFLOP/s in float32 (and 125 in float16, which is not used), 32 GB, 900 GB/s, NVLink 300 GB/s in both
        # directions. NVIDIA/NeMo has the same peaks (speed_monitor.py).
        Device(
            name="v100",
            tflops=PEAK_TFLOPS["V100"],
            memory_gb=32,
            bandwidth_gbs=900,
            link_gbs=150,
            network_gbs=12.5,
        ),
        # NVIDIA's paper on the Ada architecture (2022), appendix A: 165.2 TFLOP/s, 24 GB, 1008 GB/s.
        # Attention: 151 TFLOP/s in a forward and 99 in a backward (apache/tvm, tl_doc/flash_perf.md).
        Device(
            name="rtx4090",
            tflops=PEAK_TFLOPS["RTX 4090"],
            memory_gb=24,
            bandwidth_gbs=1008,
            network_gbs=1.25,
            attention_share=0.67,
        ),
        # NVIDIA's paper on the GA102 (as for the A6000), page 44, table 9: 71 TFLOP/s with sums in float32
        # (82 SMs with 4 x 64 multiply-adds a cycle at 1.695 GHz) and 142 in float16, 35.6 in float32; 24 GB,
        # 936 GB/s; PCIe 4.0.
        Device(
            name="rtx3090", tflops=PEAK_TFLOPS["RTX 3090"], memory_gb=24, bandwidth_gbs=936, network_gbs=1.25
        ),
        # AMD's data sheet of the MI300X (2023): 1307.4 TFLOP/s, 192 GB, 5.3 TB/s, 7 links of 64 GB/s.
        Device(name="mi300x", tflops=PEAK_TFLOPS["MI300X"], memory_gb=192, bandwidth_gbs=5300, link_gbs=448),
    )
}
"""GPUs that a plan knows by name. Networks are assumed: 400 Gbit/s for each, 200 of an A100, 100 of older and
smaller ones in racks, 10 of those in workstations."""

CONTEXT_GB = 0.56
"""CUDA's context, 10^9 bytes: 557 MB on an H100 with modules loaded at the start
(benchmarks/results/h100-2026-11-26.md)."""
FREE_SHARE = 0.04
"""Share of a device's memory that a plan leaves free, for what it does not know."""


_OWN_KEYS = {
    "tflops": "dense peak in bfloat16, TFLOP/s",
    "memory_gb": "memory, 10^9 bytes",
    "memory_gbs": "its bandwidth, 10^9 bytes per second",
    "tflops_float32": "dense peak in float32; default: half of `tflops`",
    "link_gbs": "to another GPU of the node, one direction",
    "network_gbs": "to another node, for each GPU",
    "node_gbs": "to another node, for all GPUs of a node",
    "gpus_per_node": "GPUs of a node",
    "matrix_share": "of the peak that large products reach",
    "attention_share": "of the peak that attention reaches",
    "latency_us": "of a message",
}
"""What describes a GPU that is not in `DEVICES`, whose first three must be given, or changes one that is."""
_TO_NODES = frozenset({"network_gbs", "node_gbs", "gpus_per_node"})
"""Those that `description` writes behind a device's name."""
OWN = "a GPU of your own as tflops=165,memory_gb=24,memory_gbs=1008,link_gbs=32, or a YAML file of these keys"
_LARGEST = 1e6


def find_device(name: str, *, key: str) -> Device:
    """The device called `name`, or described by it.

    Args:
        name: a key of `DEVICES`, or the path of a YAML file of `_OWN_KEYS`; followed by what differs,
            `rtx4090,node_gbs=1.25`. Or keys alone.
        key: the setting that names the device, for the message.

    Raises:
        UserError: `name` is none of these, or a number is missing or out of range.
    """
    entries = name.split(",")
    first, described = entries[0], dict[str, Any]()
    if is_file := first.endswith((".yaml", ".yml")):
        from asyncpp_cli.experiment.yaml_data import read_mapping

        described = read_mapping(Path(first).expanduser())
    elif first not in DEVICES and "=" not in first:
        raise UserError(f"{key}: {unknown(first, DEVICES)}; or {OWN}")
    further = [entry.partition("=") for entry in entries[is_file or first in DEVICES :]]
    changes = {entry.strip(): number.strip() for entry, _, number in further}
    described |= changes
    for entry in described:
        if entry not in _OWN_KEYS:
            raise UserError(f"{key}: {unknown(str(entry), _OWN_KEYS)}")
    if is_file or first in DEVICES:
        # With other links it is the same GPU, which `description` gives them.
        kept = [f"{entry}={number}" for entry, number in changes.items() if entry not in _TO_NODES]
        name = ",".join((first, *kept))
    if first in DEVICES:
        return _changed(replace(DEVICES[first], name=name), described, key=key)
    if missing := [entry for entry in list(_OWN_KEYS)[:3] if entry not in described]:
        raise UserError(f"{key}: {missing[0]} is missing ({_OWN_KEYS[missing[0]]}); accepted: {OWN}")
    own = Device(name=name, tflops={}, memory_gb=0, bandwidth_gbs=0)
    return _changed(own, described, key=key)


def _changed(device: Device, described: Mapping[str, Any], *, key: str) -> Device:
    """The device with other values of `_OWN_KEYS`."""
    numbers: dict[str, Any] = {}
    for entry, text in described.items():
        try:
            number = float(text)
        except (TypeError, ValueError):
            number = 0.0
        largest = 1.0 if entry.endswith("_share") else _LARGEST
        if not 0 < number <= largest or (entry == "gpus_per_node" and number % 1):
            raise UserError(
                f"{key}: {entry} is {text}; accepted: {_OWN_KEYS[entry]}, above 0, at most {largest:g}"
            )
        numbers[entry] = number
    if "gpus_per_node" in numbers:
        device = device.in_nodes(int(numbers.pop("gpus_per_node")))
    if "node_gbs" in numbers:
        numbers |= {"network_gbs": numbers.pop("node_gbs") / device.gpus_per_node, "shares_adapter": True}
    elif "network_gbs" in numbers:
        numbers["shares_adapter"] = False
    peaks = dict(device.tflops)
    if tflops := numbers.pop("tflops", None):
        peaks = {"bfloat16": tflops, "float32": tflops / 2}
    peaks["float32"] = numbers.pop("tflops_float32", peaks["float32"])
    bandwidth = numbers.pop("memory_gbs", device.bandwidth_gbs)
    return replace(device, tflops=peaks, bandwidth_gbs=bandwidth, **numbers)


def description(device: Device) -> str:
    """Words by which `find_device` finds a device whose links differ from those of its name."""
    named = find_device(device.name, key="")
    first, *words = device.name.split(",")
    is_file = first.endswith((".yaml", ".yml"))
    words.insert(0, str(Path(first).expanduser().resolve()) if is_file else first)
    if device.gpus_per_node != named.gpus_per_node:
        words.append(f"gpus_per_node={device.gpus_per_node}")
        named = named.in_nodes(device.gpus_per_node)
    if (device.network_gbs, device.shares_adapter) != (named.network_gbs, named.shares_adapter):
        shared = device.shares_adapter
        words.append(f"node_gbs={device.node_gbs:.9g}" if shared else f"network_gbs={device.network_gbs:.9g}")
    return ",".join(words)


def peak_tflops(device: str, precision: str) -> float | None:
    """Peak of a device by its name, in TFLOP/s; None if it is not in the table."""
    words = device.replace("-", " ").upper()
    if {"LAPTOP", "D"} & set(words.split()):  # slower ones of the same name
        return None
    for name, peaks in PEAK_TFLOPS.items():
        # Whole words: an L40 is no L4, and an A100 no A10.
        if f" {name.upper()} " in f" {words} ":
            return peaks.get(precision)
    return None
