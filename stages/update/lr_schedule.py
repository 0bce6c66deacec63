"""Learning-rate schedules. Imports no torch.

With T steps, W = max(1, round(`warmup` T)) and f = `final_lr`, the learning rate of step t (from 0) is the
peak times (t + 1) / W in the warm-up, t < W, and then, with p = (t - W) / max(1, T - W), times

    cosine      f + (1 - f) (1 + cos(pi p)) / 2
                Loshchilov and Hutter, without restarts (arXiv 1608.03983)
    linear      1 - (1 - f) p
                Defazio et al. (arXiv 2310.07831); Bergsma et al., to zero (arXiv 2502.15938)
    constant    1
    wsd         1, and in the last D = max(1, round(`decay_share` T)) steps 1 - (1 - f) (t - T + D) / D:
                warm-up, stable, decay; Hu et al. (arXiv 2404.06395), linear decay as in Haegele et al.
                (arXiv 2405.18392)

Factors reach f at t = T, one step after the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from stages.config.run_config import OptimizerConfig

DECAY_SHARE = 0.2
"""Share of the steps in which `wsd` decays, where the configuration does not say."""


def learning_rate_factor(config: OptimizerConfig, *, step: int, steps: int) -> float:
    """Learning rate of `step` (from 0) of `steps`, as a share of the peak."""
    warmup = max(1, round(config.warmup * steps))
    if step < warmup:
        return (step + 1) / warmup
    return SCHEDULES[config.schedule].factor(config, step, steps, warmup)


def _cosine(config: OptimizerConfig, step: int, steps: int, warmup: int) -> float:
    progress = (step - warmup) / max(1, steps - warmup)
    return config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def _linear(config: OptimizerConfig, step: int, steps: int, warmup: int) -> float:
    return _line(config, step, start=warmup, steps=steps)


def _constant(config: OptimizerConfig, step: int, steps: int, warmup: int) -> float:
    return 1.0


def _wsd(config: OptimizerConfig, step: int, steps: int, warmup: int) -> float:
    share = DECAY_SHARE if config.decay_share is None else config.decay_share
    start = max(warmup, steps - max(1, round(share * steps)))
    return 1.0 if step < start else _line(config, step, start=start, steps=steps)


def _line(config: OptimizerConfig, step: int, *, start: int, steps: int) -> float:
    progress = (step - start) / max(1, steps - start)
    return 1 - (1 - config.final_lr) * min(1.0, progress)


class LrSchedule(NamedTuple):
    """The learning rate after the warm-up."""

    factor: Callable[[OptimizerConfig, int, int, int], float]
    """Share of the peak, given step, steps and warm-up steps."""
    has_decay_share: bool = False
    """Whether it takes `optimizer.decay_share`."""
    constant: bool = False
    """Whether decays of a run are as good as runs of their length (arXiv 2405.18392)."""


SCHEDULES = {
    "cosine": LrSchedule(_cosine),
    "linear": LrSchedule(_linear),
    "constant": LrSchedule(_constant, constant=True),
    "wsd": LrSchedule(_wsd, has_decay_share=True),
}
"""The schedules by `optimizer.schedule`."""
