"""The description of a block's experts behind their norm. Imports no torch."""

from __future__ import annotations

from optimizers.grouping import Role
from stages.config.run_config import ModelConfig
from stages.shape.activations import CheapPart, Values
from stages.shape.moe_settings import mixture_of
from stages.shape.spec import EXPERT, Parameter, PartSpec, matrix, norm


def experts(config: ModelConfig) -> PartSpec:
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
