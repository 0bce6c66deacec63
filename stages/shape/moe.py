"""A mixture of experts: its settings, with their defaults filled in, and the description of a block's experts
behind their norm. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from optimizers.grouping import Role
from stages.config.run_config import ModelConfig
from stages.shape.activations import CheapPart, Values
from stages.shape.spec import EXPERT, Parameter, PartSpec, matrix, norm

BIAS = ".experts.bias"
"""End of a balance bias's name."""
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
        score=config.router_score or "sigmoid",
        normalised=True if config.route_normalised is None else config.route_normalised,
        scale=1.0 if config.route_scale is None else config.route_scale,
        balance=config.balance or "bias",
        balance_rate=BALANCE_RATE if config.balance_rate is None else config.balance_rate,
    )


def has_experts(config: ModelConfig, block: int) -> bool:
    """Whether the block with this number has experts."""
    return config.experts > 0 and block >= config.dense_layers


def block_part(config: ModelConfig, block: int) -> str:
    """The part of a profile that the block with this number is: `dense_block` beside blocks of experts, else
    `block`."""
    return "dense_block" if config.experts and not has_experts(config, block) else "block"


def describe_experts(config: ModelConfig) -> PartSpec:
    """Router, routed experts and shared experts behind their norm."""
    mixture = mixture_of(config)
    assert mixture is not None
    width, hidden, active = config.width, mixture.width, mixture.active
    router = Parameter("experts.router.weight", (mixture.experts, width), Role.ROUTER, "mlp.gate.weight")
    stacks = tuple(
        Parameter(
            f"experts.{name}",
            (mixture.experts, rows, columns),
            Role.MATRIX,
            f"mlp.experts.{EXPERT}.{name}_proj.weight",
        )
        for name, rows, columns in (("gate", hidden, width), ("up", hidden, width), ("down", width, hidden))
    )
    bias = Parameter("experts.bias", (mixture.experts,), Role.VECTOR, "mlp.gate.e_score_correction_bias")
    # Scores of all experts; weights of the chosen, if normalised before and after, and their sum; the chosen,
    # and the order of the rows both ways.
    weights = 2 * active + 1 if mixture.normalised else active
    scores = Values(wide=mixture.experts + weights, indices=3 * active)
    routed = PartSpec(
        parameters=(router, *stacks),
        biases=(bias,),
        idle=3 * (mixture.experts - active) * width * hidden,
        multiply_adds=width * mixture.experts + 3 * active * width * hidden,
        # The norm's output; the products with gate and up.
        kept=Values(narrow=width + 2 * active * hidden) + scores,
        kept_selectively=Values(narrow=2 * active * hidden) + scores,
        # The norm's output, the gradients of gate and up; the hidden values, the gradient of the output.
        deferred=Values(narrow=width + 2 * active * hidden + active * hidden + width, indices=active),
        passing=Values(narrow=active * (2 * width + 6 * hidden)),
    )
    return norm("mlp_norm", width, "post_attention_layernorm") + routed + _shared(width, mixture.shared_width)


def _shared(width: int, hidden: int) -> PartSpec:
    """An MLP whose input and output gradient are those of the routed experts."""
    if not hidden:
        return PartSpec()
    return PartSpec(
        parameters=(
            matrix("shared.gate", hidden, width, "mlp.shared_experts.gate_proj"),
            matrix("shared.up", hidden, width, "mlp.shared_experts.up_proj"),
            matrix("shared.down", width, hidden, "mlp.shared_experts.down_proj"),
        ),
        multiply_adds=3 * width * hidden,
        kept=Values(narrow=4 * hidden),
        kept_selectively=Values(narrow=2 * hidden),
        cheap=(CheapPart(made=Values(narrow=2 * hidden)),),
        deferred=Values(narrow=3 * hidden),
        passing=Values(narrow=4 * hidden),
    )
