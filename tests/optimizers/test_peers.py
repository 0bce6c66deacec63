"""The same steps as the optimizers of torch and of pytorch_optimizer, where those follow the formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import pytorch_optimizer as peers
import torch
from support.optimizer_models import gradients, parameters
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


@pytest.mark.parametrize(
    ("name", "peer"),
    [
        (
            "adamw",
            lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.3, foreach=False),
        ),
        (
            "nadamw",
            lambda p: torch.optim.NAdam(
                p, lr=1e-2, betas=(0.99, 0.999), weight_decay=0.3, decoupled_weight_decay=True, foreach=False
            ),
        ),
        ("adan", lambda p: peers.Adan(p, lr=1e-2, weight_decay=0.3, weight_decouple=True)),
        ("lion", lambda p: peers.Lion(p, lr=1e-2, weight_decay=0.3)),
    ],
)
def test_same_as_the_peer(
    name: str, peer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
) -> None:
    for mine, theirs in zip(
        ours(name, DECAYED, torch.float64), steps_of(peer, DECAYED, torch.float64), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_mars_is_pytorch_optimizers_but_for_what_they_add_to_the_second_moment() -> None:
    """They add 1e-15 under the root, which only the few entries feel whose second moment is as small as
    1e-10."""
    theirs = steps_of(lambda p: peers.MARS(p, lr=1e-2, weight_decay=0.3, eps=0.0), DECAYED, torch.float64)
    for mine, peer in zip(ours("mars", DECAYED, torch.float64, eps=0.0), theirs, strict=True):
        torch.testing.assert_close(mine, peer, rtol=1e-3, atol=1e-3)
        assert float((mine - peer).abs().median()) < 1e-10


def test_qhadamw_is_pytorch_optimizers_up_to_their_float32_weights() -> None:
    """They keep the weights of a new gradient in the averages in float32, with 6e-8 of rounding."""
    theirs = steps_of(
        lambda p: peers.QHAdam(
            p, lr=1e-2, betas=(0.95, 0.95), nus=(0.75, 1.0), weight_decay=0.3, weight_decouple=True
        ),
        DECAYED,
        torch.float64,
    )
    for mine, peer in zip(ours("qhadamw", DECAYED, torch.float64), theirs, strict=True):
        torch.testing.assert_close(mine, peer, rtol=1e-7, atol=1e-7)


def test_sgd_is_torchs_with_the_rate_of_an_average() -> None:
    theirs = steps_of(lambda p: torch.optim.SGD(p, lr=1e-2 * 0.1, momentum=0.9), DECAYED, torch.float64)
    for mine, peer in zip(ours("sgd", DECAYED, torch.float64, decay=0.0), theirs, strict=True):
        torch.testing.assert_close(mine, peer, rtol=1e-10, atol=1e-10)


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


def test_soap_is_pytorch_optimizers_up_to_its_float32_bases() -> None:
    """On square matrices, whose first bases are unique; without decay, which they take after the step."""
    square = ["blocks.0.attention.wq.weight", "blocks.1.attention.wq.weight"]
    mine = ours("soap", square, torch.float64, decay=0.0, refresh_interval=5)
    theirs = steps_of(
        lambda p: peers.SOAP(p, lr=1e-2, weight_decay=0.0, precondition_frequency=5), square, torch.float64
    )
    for ours_, peer in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours_, peer, rtol=1e-6, atol=1e-6)


def test_soap_without_a_refresh_is_pytorch_optimizers() -> None:
    square = ["blocks.0.attention.wq.weight", "blocks.1.attention.wq.weight"]
    mine = ours("soap", square, torch.float64, decay=0.0, refresh_interval=100)
    theirs = steps_of(
        lambda p: peers.SOAP(p, lr=1e-2, weight_decay=0.0, precondition_frequency=100), square, torch.float64
    )
    for ours_, peer in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours_, peer, rtol=1e-10, atol=1e-10)
