"""Small parameters of a stage, with every role and several shapes, and their gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from optimizers.build import build_stage_correction
from optimizers.corrections.base import Correction

SHAPES = {
    "embedding.weight": (11, 6),
    "blocks.0.attention.wq.weight": (6, 6),
    "blocks.0.attention.wk.weight": (3, 6),
    "blocks.0.attention.wv.weight": (3, 6),
    "blocks.0.mlp.up.weight": (9, 6),
    "blocks.0.mlp.down.weight": (6, 9),
    "blocks.0.attention_norm.weight": (6,),
    "blocks.1.attention.wq.weight": (6, 6),
    "blocks.1.mlp.up.weight": (9, 6),
    "blocks.1.mlp.down.weight": (6, 9),
    "blocks.1.mlp_norm.weight": (6,),
    "norm.weight": (6,),
    "head.weight": (11, 6),
}


def parameters(
    dtype: torch.dtype = torch.float64, seed: int = 0, widen: int = 1
) -> dict[str, torch.nn.Parameter]:
    """Random parameters by name; `widen` multiplies every dimension."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(draw(shape, generator, widen).to(dtype)) for name, shape in SHAPES.items()
    }


def gradients(
    steps: int, dtype: torch.dtype = torch.float64, seed: int = 1, widen: int = 1
) -> dict[str, list[Tensor]]:
    """For each parameter, one gradient per step: a constant part and noise."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: [(constant + 0.5 * draw(shape, generator, widen)).to(dtype) for _ in range(steps)]
        for name, shape in SHAPES.items()
        for constant in [draw(shape, generator, widen)]
    }


def draw(shape: tuple[int, ...], generator: torch.Generator, widen: int) -> Tensor:
    return torch.randn([side * widen for side in shape], generator=generator, dtype=torch.float64)


def rates(steps: int, peak: float) -> list[float]:
    """Learning rates with warm-up and decay, so that a rule that ignores their changes fails."""
    return [peak * min(1.0, (step + 1) / 4) * (0.6 + 0.4 * math.cos(step / steps)) for step in range(steps)]


def error_feedback(coefficient: float, form: str = "look-ahead", **options: str) -> Correction:
    """Error feedback of the catalogue, in one of its forms."""
    name = "error-feedback" if form == "look-ahead" else f"error-feedback-{form}"
    return build_stage_correction(name, options={"coefficient": coefficient, **options}, delay=1, mismatch=0)
