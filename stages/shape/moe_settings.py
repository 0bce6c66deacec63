"""The settings of a mixture of experts, with their defaults filled in. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from stages.config.run_config import ModelConfig

BIAS = ".experts.bias"
"""End of a balance bias's name."""
SCORES = ("sigmoid", "softmax")
"""What `model.router_score` accepts."""
BALANCES = ("bias", "none")
"""What `model.balance` accepts."""
BALANCE_RATE = 1e-3
"""Default of `model.balance_rate`, that of DeepSeek-V3 (arXiv 2412.19437, section 4.2)."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The experts of a block."""

    experts: int
    """Number of routed experts, E."""
    active: int
    """Experts that a token is sent to, k."""
    width: int
    """Hidden width of an expert."""
    shared_width: int
    """Hidden width of the shared experts together, which are computed as one; 0: there are none."""
    dense_layers: int
    """Number of first blocks that have an MLP in place of experts."""
    score: str
    """`sigmoid` or `softmax`."""
    normalised: bool
    """Whether the weights of the chosen experts are divided by their sum."""
    scale: float
    """Factor of the weights."""
    balance: str
    """`bias`: the balance bias moves after each step; `none`: it stays 0."""
    balance_rate: float
    """Step of the balance bias."""


def mixture_of(config: ModelConfig) -> Mixture | None:
    """The experts of a model; None: all blocks are dense.

    Raises:
        ValueError: the experts' number or width is not set, which validation refuses earlier.
    """
    if not config.experts:
        return None
    if config.active_experts is None or config.expert_width is None:
        raise ValueError("experts need model.active_experts and model.expert_width")
    return Mixture(
        experts=config.experts,
        active=config.active_experts,
        width=config.expert_width,
        shared_width=config.shared_experts * config.expert_width,
        dense_layers=config.dense_layers,
        score=config.router_score or SCORES[0],
        normalised=True if config.route_normalised is None else config.route_normalised,
        scale=1.0 if config.route_scale is None else config.route_scale,
        balance=config.balance or BALANCES[0],
        balance_rate=BALANCE_RATE if config.balance_rate is None else config.balance_rate,
    )


def has_experts(config: ModelConfig, block: int) -> bool:
    """Whether the block with this number has experts."""
    return config.experts > 0 and block >= config.dense_layers


def block_part(config: ModelConfig, block: int) -> str:
    """The part of a profile that the block with this number is: `dense_block` beside blocks of experts, else
    `block`."""
    return "dense_block" if config.experts and not has_experts(config, block) else "block"
