"""Non-finite gradients on a chosen data rank at chosen updates."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stages.weights.flat_buffers import GradientBuffer
from stages.weights.weight_versions import WeightVersions


def spoil_gradients(
    patch: pytest.MonkeyPatch, *, when: Callable[[WeightVersions], bool], data_rank: int
) -> None:
    """Put a NaN into the gradient of the second block's stage on one data rank."""
    take = WeightVersions.take_gradient

    def spoiled(self: WeightVersions) -> GradientBuffer:
        gradient = take(self)
        chosen = self.owned == self.ownership.owned[data_rank] and "blocks.1.mlp_norm.weight" in self.names
        if chosen and when(self):
            gradient.views[-1].view(-1)[-1] = float("nan")
        return gradient

    patch.setattr(WeightVersions, "take_gradient", spoiled)


def newest_version(weights: WeightVersions) -> int:
    return max(replica.version for replica in weights.replicas)
