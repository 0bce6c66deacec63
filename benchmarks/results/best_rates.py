"""The best of the learning rates tried for an arm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Best:
    """An arm at the best of the rates tried."""

    lr: float
    losses: Mapping[int, float]
    """Validation loss by seed."""
    tried: Mapping[float, float]
    """Mean loss by rate, over the seeds that all rates have."""

    @property
    def on_edge(self) -> bool:
        return self.lr in (min(self.tried), max(self.tried))


def best(rates: Mapping[float, Mapping[int, float]]) -> Best:
    """The rate with the lowest mean among those with the most seeds.

    So more seeds can be run at the rates that were best with the first ones.

    Args:
        rates: loss by rate and seed.

    Raises:
        ValueError: the rates have no seed in common.
    """
    common = set.intersection(*(set(losses) for losses in rates.values()))
    if not common:
        raise ValueError(
            f"no seed was run at all of the rates {', '.join(f'{lr:g}' for lr in sorted(rates))}"
        )
    most = max(map(len, rates.values()))
    candidates = {lr: losses for lr, losses in rates.items() if len(losses) == most}
    seeds = set.intersection(*map(set, candidates.values()))
    lr = min(candidates, key=lambda rate: _mean(candidates[rate], seeds))
    return Best(
        lr=lr,
        losses=rates[lr],
        tried={rate: _mean(losses, common) for rate, losses in sorted(rates.items())},
    )


def _mean(losses: Mapping[int, float], seeds: set[int]) -> float:
    return float(np.mean([losses[seed] for seed in seeds]))
