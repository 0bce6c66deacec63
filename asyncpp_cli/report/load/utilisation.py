"""Model FLOP/s utilisation (MFU): the arithmetic that the model needs over the peak of its devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.config import RunConfig
from stages.model.families.catalogue import FAMILIES, describe

PEAK_TFLOPS: tuple[tuple[str, Mapping[str, float]], ...] = (
    ("B200", {"bfloat16": 2250.0, "float32": 75.0}),
    ("GH200", {"bfloat16": 989.4, "float32": 66.9}),
    ("H200 NVL", {"bfloat16": 835.5, "float32": 60.0}),
    ("H200", {"bfloat16": 989.4, "float32": 66.9}),
    ("H100 PCIe", {"bfloat16": 756.0, "float32": 51.2}),
    ("H100 NVL", {"bfloat16": 835.5, "float32": 60.0}),
    ("H100", {"bfloat16": 989.4, "float32": 66.9}),
    ("A100", {"bfloat16": 312.0, "float32": 19.5}),
    ("L40S", {"bfloat16": 362.05, "float32": 91.6}),
    ("L4", {"bfloat16": 121.0, "float32": 30.3}),
    ("A10", {"bfloat16": 125.0, "float32": 31.2}),
    ("MI300X", {"bfloat16": 1307.4, "float32": 163.4}),
)
"""Dense peak of a device by a part of its name, in TFLOP/s: the makers' data sheets, without sparsity.

The first match counts. float32 is plain float32: torch uses no TF32 by default.
"""

_TERA = 1e12


def peak_tflops(device: str, precision: str) -> float | None:
    """Peak of a device by its name, in TFLOP/s; None if it is not in the table."""
    words = device.replace("-", " ").upper()
    for name, peaks in PEAK_TFLOPS:
        # Whole words: an L40 is no L4, and an A100 no A10.
        if f" {name.upper()} " in f" {words} ":
            return peaks.get(precision)
    return None


def utilisation(
    config: RunConfig,
    *,
    start: Mapping[str, Any] | None,
    tokens_per_second: float | None,
    ranks: int | None,
) -> float | None:
    """MFU in 0..1, with one device per rank; None where the throughput, the device's peak or the model's
    arithmetic is unknown.

    `site.peak_tflops` of the configuration goes before the table.

    Args:
        config: of the run.
        start: its `start` row.
        tokens_per_second: in steady state, of all ranks together.
        ranks: of the run.
    """
    if start is None or tokens_per_second is None or not ranks:
        return None
    if config.model.factory is not None or config.model.family not in FAMILIES:
        return None
    device = start.get("device")
    if not isinstance(device, str):
        return None
    peak = config.site.peak_tflops or peak_tflops(device, config.train.precision)
    if not peak:
        return None
    flops = describe(config.model).training_flops(context=config.data.context)
    return tokens_per_second * flops / (ranks * peak * _TERA)
