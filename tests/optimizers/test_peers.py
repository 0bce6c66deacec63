"""The same steps as the optimizers of torch and of pytorch_optimizer, where those follow the formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import pytorch_optimizer as peers
import torch
from support.optimizer_references import gradients, parameters
from torch import Tensor

from optimizers.build import build_optimizer

STEPS = 20


def steps_of(
    build: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], names: list[str], dtype: torch.dtype
) -> list[Tensor]:
    weights, steps = parameters(dtype), gradients(STEPS, dtype)
    optimizer = build([weights[name] for name in names])
    for step in range(STEPS):
        for name in names:
            weights[name].grad = steps[name][step].clone()
        optimizer.step()
    return [weights[name].detach() for name in names]


def ours(
    name: str, names: list[str], dtype: torch.dtype, lr: float = 1e-2, decay: float = 0.3, **options: Any
) -> list[Tensor]:
    def build(weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        named = dict(zip(names, weights, strict=True))
        return build_optimizer(named, name=name, lr=lr, weight_decay=decay, options=options)

    return steps_of(build, names, dtype)


MATRICES = [name for name in parameters() if name.startswith("blocks") and "norm" not in name]
DECAYED = [*MATRICES, "head.weight"]
SQUARE = ["blocks.0.attention.wq.weight", "blocks.1.attention.wq.weight"]
"""Whose first bases are unique."""
FREQUENCY = "precondition_frequency"
NADAM = {"betas": (0.99, 0.999), "decoupled_weight_decay": True, "foreach": False}
SOAP = {"weight_decay": 0.0}
LR, DECAY = {"lr": 1e-2}, {"lr": 1e-2, "weight_decay": 0.3}
DECOUPLED = DECAY | {"weight_decouple": True}


@pytest.mark.parametrize(
    ("name", "options", "peer", "theirs", "tolerance"),
    [
        ("adamw", {}, torch.optim.AdamW, DECAY | {"betas": (0.9, 0.95), "foreach": False}, 1e-10),
        ("nadamw", {}, torch.optim.NAdam, DECAY | NADAM, 1e-10),
        ("adan", {}, peers.Adan, DECOUPLED, 1e-10),
        ("lion", {}, peers.Lion, DECAY, 1e-10),
        # The rate is that of an average.
        ("sgd", {"decay": 0.0}, torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}, 1e-10),
        # They keep the weights of a new gradient in the averages in float32, with 6e-8 of rounding.
        ("qhadamw", {}, peers.QHAdam, DECOUPLED | {"betas": (0.95, 0.95), "nus": (0.75, 1.0)}, 1e-7),
        # They add 1e-15 under the root, which only the few entries feel whose second moment is as small.
        ("mars", {"eps": 0.0}, peers.MARS, DECAY | {"eps": 0.0}, 1e-3),
        # Without decay, which they take after the step; their bases are of float32.
        ("soap", {"decay": 0.0, "refresh_interval": 5}, peers.SOAP, LR | SOAP | {FREQUENCY: 5}, 1e-6),
        ("soap", {"decay": 0.0, "refresh_interval": 100}, peers.SOAP, LR | SOAP | {FREQUENCY: 100}, 1e-10),
    ],
)
def test_same_as_the_peer(
    name: str, options: dict[str, Any], peer: Any, theirs: dict[str, Any], tolerance: float
) -> None:
    names = SQUARE if name == "soap" else DECAYED
    expected = steps_of(lambda weights: peer(weights, **theirs), names, torch.float64)
    for mine, other in zip(ours(name, names, torch.float64, **options), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
        assert float((mine - other).abs().median()) < (1e-10 if name == "mars" else tolerance)


@pytest.mark.parametrize("scale", ["match-rms", "original"])
def test_muon_is_torchs_up_to_its_bfloat16(scale: str) -> None:
    """torch orthogonalizes in bfloat16 (8 bits: about 1 % an entry after five iterations), so no more can
    be equal."""
    adjust = {"match-rms": "match_rms_adamw", "original": "original"}[scale]

    def peer(weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon(weights, lr=1e-2, momentum=0.95, weight_decay=0.3, adjust_lr_fn=adjust)

    start = parameters(torch.float32)
    mine = ours("muon", MATRICES, torch.float32, scale=scale)
    coarse = ours("muon", MATRICES, torch.float32, scale=scale, precision="bfloat16")
    for name, exact, rounded, theirs in zip(
        MATRICES, mine, coarse, steps_of(peer, MATRICES, torch.float32), strict=True
    ):
        moved = (exact - start[name]).norm()
        assert (exact - theirs).norm() < 0.02 * moved
        assert (rounded - theirs).norm() < 0.02 * moved
