"""Optimizer rules that run Adam in a rotated basis, written out for one tensor.

The functions take the bases of the first step, because they are not unique: a matrix with more columns than
rows leaves some directions undetermined, and their choice changes every later step. `test_rotation.py` checks
the bases themselves.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from support.elementwise_references import Steps
from torch import Tensor


def sorted_power_step(symmetric: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.argsort(torch.diag(basis.T @ symmetric @ basis), descending=True, stable=True)
    return torch.linalg.qr(symmetric @ basis[:, order]).Q, order


def soap(
    w: Tensor,
    steps: Steps,
    wd: float,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    refresh_interval: int,
    first_bases: tuple[Tensor, Tensor],
) -> Tensor:
    g = steps[0][0]
    left, right = (1 - beta2) * g @ g.T, (1 - beta2) * g.T @ g
    q_left, q_right = first_bases
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, (g, lr) in enumerate(steps[1:], start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * (q_left.T @ g @ q_right) ** 2
        correction = math.sqrt(1 - beta2**t) / (1 - beta1**t)
        step = q_left @ ((q_left.T @ m @ q_right) / (v.sqrt() + eps)) @ q_right.T
        w = (1 - lr * wd) * w - lr * correction * step
        left = beta2 * left + (1 - beta2) * g @ g.T
        right = beta2 * right + (1 - beta2) * g.T @ g
        if t % refresh_interval == 0:
            q_left, rows = sorted_power_step(left, q_left)
            q_right, columns = sorted_power_step(right, q_right)
            v = v[rows][:, columns]
    return w


def basis_rotation(
    w: Tensor,
    steps: Steps,
    wd: float,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    source: str,
    geometry: str,
    refresh_interval: int,
    first_bases: tuple[Tensor, Tensor],
    **_: Any,
) -> Tensor:
    rows, columns = w.shape
    on_left = geometry == "bilateral" or rows < columns
    on_right = geometry == "bilateral" or rows >= columns
    left, right = torch.zeros(rows, rows).to(w), torch.zeros(columns, columns).to(w)
    u, v = first_bases
    m, n = torch.zeros_like(w), torch.zeros_like(w)
    for t, (g, lr) in enumerate(steps, start=1):
        m = beta1 * m + (1 - beta1) * g
        left, right = beta2 * left + (1 - beta2) * g @ g.T, beta2 * right + (1 - beta2) * g.T @ g
        refreshed = t > 1 and (t - 1) % refresh_interval == 0
        if refreshed and source == "second-moment":
            if on_left:
                u, order = sorted_power_step(left, u)
                n = n[order]
            if on_right:
                v, order = sorted_power_step(right, v)
                n = n[:, order]
        elif refreshed:
            if on_left and on_right:
                u = completed(m @ v, u)
                v = completed(m.T @ u, v)
            elif on_left:
                u = completed(m @ (m.T @ u), u)
            else:
                v = completed(m.T @ (m @ v), v)
        n = beta2 * n + (1 - beta2) * (u.T @ g @ v) ** 2
        adam = (u.T @ m @ v) / ((n / (1 - beta2**t)).sqrt() + eps)
        w = (1 - lr * wd) * w - lr / (1 - beta1**t) * (u @ adam @ v.T)
    return w


def completed(images: Tensor, basis: Tensor) -> Tensor:
    size = len(basis)
    return torch.linalg.qr(torch.cat([images, basis[:, images.shape[1] :]], dim=1)[:, :size]).Q
