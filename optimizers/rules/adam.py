"""AdamW and NAdamW: torch's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from optimizers.rules.base import Group


def adamw(groups: list[Group], settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    """`torch.optim.AdamW` with settings `beta1`, `beta2` and `eps`, or MARS's own betas for vectors."""
    betas = (
        settings.get("vector_beta1", settings["beta1"]),
        settings.get("vector_beta2", settings["beta2"]),
    )
    return torch.optim.AdamW(groups, betas=betas, eps=settings["eps"], fused=True)


def nadamw(groups: list[Group], settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    """`torch.optim.NAdam` with decoupled weight decay and settings `beta1`, `beta2`, `eps` and
    `momentum_decay`."""
    return torch.optim.NAdam(
        groups,
        betas=(settings["beta1"], settings["beta2"]),
        eps=settings["eps"],
        momentum_decay=settings["momentum_decay"],
        decoupled_weight_decay=True,
        foreach=True,
    )
