"""The model families by name: each a file in this folder, and a line here. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from optimizers.grouping import Role, role_of
from stages.config import ModelConfig
from stages.model.activations import CheapPart, Values
from stages.model.families.llama import LLAMA
from stages.model.families.qwen3 import QWEN3
from stages.model.moe import description as moe
from stages.model.moe.settings import has_experts
from stages.model.spec import Family, ModelSpec, PartSpec, decoder, matrix, norm

FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "qwen3": QWEN3,
}
"""What `model.family` accepts."""


def describe(config: ModelConfig) -> ModelSpec:
    """The description of a configuration's model; of a model of the user's own, of the family's with the same
    sizes."""
    return _described(tuple(vars(config).values()))


@lru_cache(maxsize=256)  # a planner asks for the same model again and again
def _described(settings: tuple[Any, ...]) -> ModelSpec:
    config = ModelConfig(*settings)
    attention = FAMILIES[config.family].attention(config)
    dense = mlp(config)
    routed = moe.experts(config) if config.experts else dense
    mlps = tuple(routed if has_experts(config, block) else dense for block in range(config.layers))
    return decoder(config, attention, mlps)


def mlp(config: ModelConfig) -> PartSpec:
    """SwiGLU behind its norm."""
    width, hidden = config.width, config.mlp_width
    matrices = PartSpec(
        parameters=(
            matrix("mlp.gate", hidden, width, "mlp.gate_proj"),
            matrix("mlp.up", hidden, width, "mlp.up_proj"),
            matrix("mlp.down", width, hidden, "mlp.down_proj"),
        ),
        multiply_adds=3 * width * hidden,
        # The norm's output; gate, its SiLU, up, and their product.
        kept=Values(narrow=width + 4 * hidden),
        kept_selectively=Values(narrow=2 * hidden),
        cheap=(CheapPart(made=Values(narrow=2 * hidden)),),
        deferred=Values(narrow=(width + hidden) + (2 * hidden + width)),
        passing=Values(narrow=4 * hidden),
    )
    return norm("mlp_norm", width, "post_attention_layernorm") + matrices


def parameter_roles(config: ModelConfig, dimensions: Mapping[str, int]) -> dict[str, Role]:
    """The optimizer's role of each parameter, given the number of its dimensions by name.

    Raises:
        ValueError: a parameter of the user's own model has no rule.
    """
    if config.factory is not None:
        return {name: role_of(name, count) for name, count in dimensions.items()}
    spec = describe(config)
    return {name: spec.role(name) for name in dimensions}
