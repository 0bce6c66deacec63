"""Element-wise optimizer rules, written out for one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Steps = Sequence[tuple[Tensor, float]]
"""Gradient and learning rate of each step."""


def sgd(w: Tensor, steps: Steps, wd: float, *, momentum: float, nesterov: bool) -> Tensor:
    m = torch.zeros_like(w)
    for g, lr in steps:
        m = momentum * m + (1 - momentum) * g
        direction = (1 - momentum) * g + momentum * m if nesterov else m
        w = (1 - lr * wd) * w - lr * direction
    return w


def adamw(w: Tensor, steps: Steps, wd: float, *, beta1: float, beta2: float, eps: float, **_: Any) -> Tensor:
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, (g, lr) in enumerate(steps, start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        w = (1 - lr * wd) * w - lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
    return w


def nadamw(
    w: Tensor, steps: Steps, wd: float, *, beta1: float, beta2: float, eps: float, momentum_decay: float
) -> Tensor:
    m, v, product = torch.zeros_like(w), torch.zeros_like(w), 1.0
    for t, (g, lr) in enumerate(steps, start=1):
        mu = beta1 * (1 - 0.5 * 0.96 ** (t * momentum_decay))
        mu_next = beta1 * (1 - 0.5 * 0.96 ** ((t + 1) * momentum_decay))
        product *= mu
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        look_ahead = (1 - mu) * g / (1 - product) + mu_next * m / (1 - product * mu_next)
        w = (1 - lr * wd) * w - lr * look_ahead / ((v / (1 - beta2**t)).sqrt() + eps)
    return w


def qhadamw(
    w: Tensor, steps: Steps, wd: float, *, beta1: float, beta2: float, eps: float, momentum_weight: float
) -> Tensor:
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, (g, lr) in enumerate(steps, start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        direction = (1 - momentum_weight) * g + momentum_weight * m / (1 - beta1**t)
        w = (1 - lr * wd) * w - lr * direction / ((v / (1 - beta2**t)).sqrt() + eps)
    return w


def lion(w: Tensor, steps: Steps, wd: float, *, beta1: float, beta2: float) -> Tensor:
    m = torch.zeros_like(w)
    for g, lr in steps:
        w = (1 - lr * wd) * w - lr * torch.sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g
    return w


def adan(
    w: Tensor, steps: Steps, wd: float, *, beta1: float, beta2: float, beta3: float, eps: float
) -> Tensor:
    m, v, n, previous = torch.zeros_like(w), torch.zeros_like(w), torch.zeros_like(w), steps[0][0]
    for t, (g, lr) in enumerate(steps, start=1):
        d = g - previous
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * d
        n = beta3 * n + (1 - beta3) * (g + beta2 * d) ** 2
        direction = m / (1 - beta1**t) + beta2 * v / (1 - beta2**t)
        w = (1 - lr * wd) * w - lr * direction / ((n / (1 - beta3**t)).sqrt() + eps)
        previous = g
    return w


def mars(
    w: Tensor, steps: Steps, wd: float, *, beta1: float, beta2: float, eps: float, gamma: float, **_: Any
) -> Tensor:
    m, v, previous = torch.zeros_like(w), torch.zeros_like(w), torch.zeros_like(w)
    for t, (g, lr) in enumerate(steps, start=1):
        c = g + gamma * beta1 / (1 - beta1) * (g - previous)
        norm = float((c**2).sum().sqrt())
        if norm > 1:
            c = c / norm
        m = beta1 * m + (1 - beta1) * c
        v = beta2 * v + (1 - beta2) * c**2
        w = (1 - lr * wd) * w - lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
        previous = g
    return w
