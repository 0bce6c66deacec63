"""AdamW and NAdamW: torch's own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from optimizers.rules.base import EagerOptimizer, Group


class AdamW(EagerOptimizer, torch.optim.AdamW):
    """torch's, without its compiler."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class NAdam(EagerOptimizer, torch.optim.NAdam):
    """torch's, without its compiler."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.NAdam.step))


def adamw(groups: list[Group], settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    """`torch.optim.AdamW` with settings `beta1`, `beta2` and `eps`, or MARS's own betas for vectors."""
    betas = (
        settings.get("vector_beta1", settings["beta1"]),
        settings.get("vector_beta2", settings["beta2"]),
    )
    return AdamW(groups, betas=betas, eps=settings["eps"], fused=True)


def nadamw(groups: list[Group], settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    """`torch.optim.NAdam` with decoupled weight decay and settings `beta1`, `beta2`, `eps` and
    `momentum_decay`."""
    return NAdam(
        groups,
        betas=(settings["beta1"], settings["beta2"]),
        eps=settings["eps"],
        momentum_decay=settings["momentum_decay"],
        decoupled_weight_decay=True,
        foreach=True,
    )
