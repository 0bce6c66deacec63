"""Model FLOP/s utilisation (MFU): the arithmetic that the model needs over the peak of its devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncpp_cli.planner.costs.devices import peak_tflops
from stages.config.run_config import RunConfig
from stages.shape.families import FAMILIES, describe

_TERA = 1e12


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
