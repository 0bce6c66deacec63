"""Optimizer rules with orthogonalised or signed momentum, written out for one tensor."""

from __future__ import annotations

import math
from typing import Any

import torch
from support.elementwise_references import Steps
from torch import Tensor

NEWTON_SCHULZ = [(3.4445, -4.7750, 2.0315)] * 5

POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


GRAM = [
    (8.340983873487273, -24.597378447425204, 18.22303221266143),
    (3.9779944691149365, -2.9654344331587774, 0.5642720594961459),
    (3.327478708876393, -2.4952376768336983, 0.5108136171602833),
    (2.3085642173048933, -1.6759941338787725, 0.4195738939954741),
]


def by_singular_values(q: Tensor) -> Tensor:
    """The iteration `gram`: its polynomials applied to the singular values themselves."""
    u, s, vh = torch.linalg.svd(q / (q.square().sum().sqrt() + 1e-7), full_matrices=False)
    s = s / (s.pow(8).sum().pow(1 / 8) * 1.01)
    for number, (a, b, c) in enumerate(GRAM):
        if number < 3:
            a, b, c = a / 1.01, b / 1.01**3, c / 1.01**5
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vh


def orthogonal(q: Tensor, iteration: str = "newton-schulz") -> Tensor:
    if iteration == "gram":
        return by_singular_values(q)
    polar = iteration == "polar-express"
    x = q / (q.square().sum().sqrt() * (1.02 if polar else 1.0) + 1e-7)
    if q.shape[0] > q.shape[1]:
        x = x.T
    for a, b, c in POLAR_EXPRESS if polar else NEWTON_SCHULZ:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if q.shape[0] > q.shape[1] else x


def muon(
    w: Tensor,
    steps: Steps,
    wd: float,
    *,
    momentum: float,
    nesterov: bool,
    scale: str,
    iteration: str,
    **_: Any,
) -> Tensor:
    rows, columns = w.shape
    factor = (
        0.2 * math.sqrt(max(rows, columns)) if scale == "match-rms" else math.sqrt(max(1.0, rows / columns))
    )
    m = torch.zeros_like(w)
    for g, lr in steps:
        m = momentum * m + (1 - momentum) * g
        q = (1 - momentum) * g + momentum * m if nesterov else m
        w = (1 - lr * wd) * w - lr * factor * orthogonal(q, iteration)
    return w


def normuon(
    w: Tensor,
    steps: Steps,
    wd: float,
    *,
    momentum: float,
    nesterov: bool,
    row_beta2: float,
    row_eps: float,
    scale: str,
    iteration: str,
    **_: Any,
) -> Tensor:
    rows, columns = w.shape
    m, v = torch.zeros_like(w), torch.zeros_like(w[:, :1])
    for g, lr in steps:
        m = momentum * m + (1 - momentum) * g
        o = orthogonal((1 - momentum) * g + momentum * m if nesterov else m, iteration)
        v = row_beta2 * v + (1 - row_beta2) * (o**2).mean(dim=1, keepdim=True)
        length = float((o**2).sum().sqrt()) * math.sqrt(max(1.0, rows / columns))
        if scale == "match-rms":
            length = 0.2 * math.sqrt(rows * columns)
        o = o / (v.sqrt() + row_eps)
        w = (1 - lr * wd) * w - lr * length * o / (o**2).sum().sqrt()
    return w


def scion_spectral(
    w: Tensor,
    steps: Steps,
    wd: float,
    *,
    momentum: float,
    radius: float,
    iteration: str,
    constrained: bool,
    **_: Any,
) -> Tensor:
    wd = 1.0 if constrained else wd
    m = torch.zeros_like(w)
    for g, lr in steps:
        m = momentum * m + (1 - momentum) * g
        w = (1 - lr * wd) * w - lr * radius * math.sqrt(w.shape[0] / w.shape[1]) * orthogonal(m, iteration)
    return w


def scion_sign(
    w: Tensor, steps: Steps, wd: float, *, momentum: float, sign_radius: float, constrained: bool, **_: Any
) -> Tensor:
    wd = 1.0 if constrained else wd
    m = torch.zeros_like(w)
    for g, lr in steps:
        m = momentum * m + (1 - momentum) * g
        w = (1 - lr * wd) * w - lr * sign_radius / w.shape[1] * torch.sign(m)
    return w
