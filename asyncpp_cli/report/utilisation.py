"""Model FLOP/s utilisation (MFU): the arithmetic that the model needs over what its devices could do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

The first that matches counts. float32 is that of plain float32: torch uses no TF32 unless told to.
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


def flops_per_token(config: Mapping[str, Any], parameters: int) -> float:
    """Floating-point operations of a forward and a backward of one token.

    Six for every parameter that is multiplied with (all but the embedding table, which is looked up), and
    12 x layers x width x context for attention, as if it were not causal (arXiv 2204.02311, appendix B).
    Recomputed activations do not count.
    """
    width = config["model.width"]
    multiplied = parameters - config["model.vocab_size"] * width
    return float(6 * multiplied + 12 * config["model.layers"] * width * config["data.context"])


def utilisation(
    config: Mapping[str, Any],
    *,
    start: Mapping[str, Any] | None,
    tokens_per_second: float | None,
    ranks: int | None,
) -> float | None:
    """MFU in 0..1, with a device a rank; None where the throughput or the device's peak is unknown.

    `site.peak_tflops` of the configuration goes before the table.

    Args:
        config: of the run, by dotted key.
        start: its `start` row.
        tokens_per_second: in steady state, of all ranks together.
        ranks: of the run.
    """
    if start is None or tokens_per_second is None or not ranks or config.get("model.factory") is not None:
        # Of a model of the user's own the arithmetic is not known.
        return None
    device, parameters = start.get("device"), start.get("parameters")
    if not isinstance(device, str) or not isinstance(parameters, int):
        return None
    peak = config.get("site.peak_tflops") or peak_tflops(device, str(config.get("train.precision")))
    if not peak:
        return None
    return tokens_per_second * flops_per_token(config, parameters) / (ranks * peak * _TERA)
