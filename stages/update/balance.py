"""Balance of experts without an auxiliary loss, and the measured load.

The balance bias of an expert is added to its score when experts are chosen, and nowhere else. After an update
that followed on `load` tokens by expert, it moves by a fixed rate towards an even load, and is centred (Wang
et al., arXiv 2408.15664, Algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2):

    b <- b + rate sign(mean(load) - load);  b <- b - mean(b)

Only differences of biases matter, so centring changes no choice and keeps them from drifting. An update that
is skipped leaves the biases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def moved(biases: Tensor, loads: Tensor, *, rate: float) -> Tensor:
    """The biases after an update, a new tensor.

    Args:
        biases: of each block of experts, float32 `(blocks, experts)`.
        loads: tokens by chosen expert in the update, over all data ranks, int64 of the same shape.
        rate: see the module.
    """
    totals = loads.sum(dim=-1, keepdim=True)
    # Integers, so that an even load is recognised.
    steps = torch.sign(totals - loads * loads.shape[-1]).to(biases.dtype)
    moved = biases + rate * steps
    return moved - moved.mean(dim=-1, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class BlockLoad:
    """The load of one block's experts in a segment."""

    max_over_mean: float
    """Tokens of the busiest expert of an update over the mean of all experts; the mean over the updates."""
    entropy: float
    """Entropy of the experts' shares of all updates' tokens, over that of an even load: 1 at most."""
    never_chosen: int
    """Experts to which no token was sent."""


class LoadTally:
    """Adds up the loads of a stage's updates in a segment, on the device.

    Args:
        blocks: numbers of the stage's blocks of experts.
        experts: in each.
        device: of the loads.
    """

    def __init__(self, blocks: Sequence[int], *, experts: int, device: torch.device) -> None:
        self._blocks = blocks
        self._loads = torch.zeros(len(blocks), experts, dtype=torch.int64, device=device)
        self._peaks = torch.zeros(len(blocks), dtype=torch.float64, device=device)
        self._updates = 0

    def add(self, loads: Tensor) -> None:
        """Add the load of an update, int64 `(blocks, experts)`."""
        if not self._blocks:
            return
        self._loads += loads
        self._peaks += loads.amax(dim=-1) / loads.double().mean(dim=-1)
        self._updates += 1

    def take(self) -> dict[int, BlockLoad]:
        """The load of each block since the last call, by the block's number; empty without updates."""
        if not self._updates:
            return {}
        shares = self._loads / self._loads.sum(dim=-1, keepdim=True)
        entropy = -torch.special.xlogy(shares, shares).sum(dim=-1)
        taken = {
            block: BlockLoad(max_over_mean=peak / self._updates, entropy=evenness, never_chosen=never)
            for block, peak, evenness, never in zip(
                self._blocks,
                self._peaks.tolist(),
                (entropy / torch.log(torch.tensor(float(shares.shape[-1])))).tolist(),
                (self._loads == 0).sum(dim=-1).tolist(),
                strict=True,
            )
        }
        self._loads.zero_()
        self._peaks.zero_()
        self._updates = 0
        return taken
