"""The model families by name: each a file in this folder, and a line here. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from optimizers.grouping import Role, role_of
from stages.config.run_config import ModelConfig
from stages.shape.llama import LLAMA
from stages.shape.moe import describe_experts, has_experts
from stages.shape.qwen3 import QWEN3
from stages.shape.spec import Family, ModelSpec, decoder

FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "qwen3": QWEN3,
}
"""What `model.family` accepts."""


@lru_cache(maxsize=256)  # a planner asks for the same model again and again
def describe(config: ModelConfig) -> ModelSpec:
    """The description of a configuration's model; of a model of the user's own, of the family's with the same
    sizes."""
    family = FAMILIES[config.family]
    attention, dense = family.attention(config), family.mlp(config)
    routed = describe_experts(config) if config.experts else dense
    mlps = tuple(routed if has_experts(config, block) else dense for block in range(config.layers))
    return decoder(config, attention, mlps)


def parameter_roles(config: ModelConfig, dimensions: Mapping[str, int]) -> dict[str, Role]:
    """The optimizer's role of each parameter, given the number of its dimensions by name.

    Raises:
        ValueError: a parameter of the user's own model has no rule.
    """
    if config.factory is not None:
        return {name: role_of(name, count) for name, count in dimensions.items()}
    spec = describe(config)
    return {name: spec.role(name) for name in dimensions}
