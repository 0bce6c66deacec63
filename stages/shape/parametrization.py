"""What `model.parametrization: mup` makes of a model's size relative to its base model. Imports no torch.

With m the width and l the number of blocks, each over the base model's:

    initial standard deviation   matrices in blocks 1 / sqrt(m); all others as in the base model
    output of each half block    times 1 / l, before it is added to the residual stream
    attention logits             times sqrt(base head) / head, in place of 1 / sqrt(head)
    logits                       times 1 / m
    learning rates               `optimizers.growth`

Widths: Yang et al. (arXiv 2203.03466), as a condition on spectral norms (2310.17813). Depth: CompleteP
(2505.01618), alpha = 1. All widths of the model (`mlp_width`, heads times `head_dim`) are taken to grow with
`width`. At the base size it is the standard model. The multipliers are part of the weights that `export`
writes: a plain decoder computes the same with those.
"""

from __future__ import annotations

import re

from optimizers.growth import Growth
from stages.config.run_config import ModelConfig
from stages.shape.families import FAMILIES
from stages.shape.spec import head_dim


def growth_of(config: ModelConfig) -> Growth:
    """The size over that of the base model; all 1 in the standard parametrization."""
    if config.parametrization == "standard":
        return Growth()
    base_width, base_layers = config.base_width or config.width, config.base_layers or config.layers
    return Growth(width=config.width / base_width, depth=config.layers / base_layers)


def initial_std(config: ModelConfig, name: str) -> float:
    """Standard deviation of a matrix's initial values.

    Those that write into the residual stream (`attention.output`, `mlp.down`) have it divided by
    sqrt(2 layers) (GPT-2's rule), of the base model.

    Args:
        config: the model.
        name: of the parameter, or of one matrix of a stack.
    """
    std, growth = config.init_std, growth_of(config)
    if name.startswith("blocks."):
        std /= growth.width**0.5
    if _RESIDUAL.search(name):
        std /= (2 * config.layers / growth.depth) ** 0.5
    return std


_RESIDUAL = re.compile(r"(attention\.output\.weight|(mlp|shared)\.down\.weight|experts\.down\.[0-9]+)$")


def residual_multiplier(config: ModelConfig) -> float:
    """Factor of what a half block adds to the residual stream."""
    return 1 / growth_of(config).depth


def output_multiplier(config: ModelConfig) -> float:
    """Factor of the logits."""
    return 1 / growth_of(config).width


def attention_scale(config: ModelConfig) -> float | None:
    """Factor of the attention logits; None: 1 / sqrt(head_dim)."""
    if config.parametrization == "standard":
        return None
    return float((config.base_head_dim or head_dim(config)) ** 0.5 / head_dim(config))


def factor_in_plain_decoder(config: ModelConfig, name: str) -> float:
    """Factor on the parameter `name` with which a decoder without multipliers computes the same."""
    if name == "norm.weight":
        return output_multiplier(config)
    if name.endswith(("attention.output.weight", "mlp.down.weight")):
        return residual_multiplier(config)
    queries = "query_norm" if FAMILIES[config.family].normalized else "query"
    scale = attention_scale(config)
    if scale is not None and name.endswith(f"attention.{queries}.weight"):
        return float(scale * head_dim(config) ** 0.5)
    return 1.0
