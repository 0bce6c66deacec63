"""Reference implementation of every optimizer rule: slow, and written as the formula reads.

Each function takes the initial weights of one tensor, a gradient and a learning rate per step, and the rule's
options by name. It returns the final weights. Those that run Adam in a rotated basis also take the bases of
the first step, because they are not unique: a matrix with more columns than rows leaves some directions
undetermined, and their choice changes every later step. `test_rotation.py` checks the bases themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from optimizers.corrections.base import Correction, build_stage_correction

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


Steps = Sequence[tuple[Tensor, float]]
"""Gradient and learning rate of each step."""


def sgd(w: Tensor, steps: Steps, wd: float, *, momentum, nesterov) -> Tensor:
    m = torch.zeros_like(w)
    for g, lr in steps:
        m = momentum * m + (1 - momentum) * g
        direction = (1 - momentum) * g + momentum * m if nesterov else m
        w = (1 - lr * wd) * w - lr * direction
    return w


def adamw(w: Tensor, steps: Steps, wd: float, *, beta1, beta2, eps, **_) -> Tensor:
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, (g, lr) in enumerate(steps, start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        w = (1 - lr * wd) * w - lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
    return w


def nadamw(w: Tensor, steps: Steps, wd: float, *, beta1, beta2, eps, momentum_decay) -> Tensor:
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


def qhadamw(w: Tensor, steps: Steps, wd: float, *, beta1, beta2, eps, momentum_weight) -> Tensor:
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, (g, lr) in enumerate(steps, start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        direction = (1 - momentum_weight) * g + momentum_weight * m / (1 - beta1**t)
        w = (1 - lr * wd) * w - lr * direction / ((v / (1 - beta2**t)).sqrt() + eps)
    return w


def lion(w: Tensor, steps: Steps, wd: float, *, beta1, beta2) -> Tensor:
    m = torch.zeros_like(w)
    for g, lr in steps:
        w = (1 - lr * wd) * w - lr * torch.sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g
    return w


def adan(w: Tensor, steps: Steps, wd: float, *, beta1, beta2, beta3, eps) -> Tensor:
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


def mars(w: Tensor, steps: Steps, wd: float, *, beta1, beta2, eps, gamma, **_) -> Tensor:
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


def muon(w: Tensor, steps: Steps, wd: float, *, momentum, nesterov, scale, iteration, **_) -> Tensor:
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
    w: Tensor, steps: Steps, wd: float, *, momentum, nesterov, row_beta2, row_eps, scale, iteration, **_
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
    w: Tensor, steps: Steps, wd: float, *, momentum, radius, iteration, constrained, **_
) -> Tensor:
    wd = 1.0 if constrained else wd
    m = torch.zeros_like(w)
    for g, lr in steps:
        m = momentum * m + (1 - momentum) * g
        w = (1 - lr * wd) * w - lr * radius * math.sqrt(w.shape[0] / w.shape[1]) * orthogonal(m, iteration)
    return w


def scion_sign(w: Tensor, steps: Steps, wd: float, *, momentum, sign_radius, constrained, **_) -> Tensor:
    wd = 1.0 if constrained else wd
    m = torch.zeros_like(w)
    for g, lr in steps:
        m = momentum * m + (1 - momentum) * g
        w = (1 - lr * wd) * w - lr * sign_radius / w.shape[1] * torch.sign(m)
    return w


def sorted_power_step(symmetric: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.argsort(torch.diag(basis.T @ symmetric @ basis), descending=True, stable=True)
    return torch.linalg.qr(symmetric @ basis[:, order]).Q, order


def soap(w: Tensor, steps: Steps, wd: float, *, beta1, beta2, eps, refresh_interval, first_bases) -> Tensor:
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
    beta1,
    beta2,
    eps,
    source,
    geometry,
    refresh_interval,
    first_bases,
    **_,
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


RULES = {
    "adamw": adamw,
    "adan": adan,
    "basis-rotation": basis_rotation,
    "lion": lion,
    "mars": mars,
    "muon": muon,
    "nadamw": nadamw,
    "normuon": normuon,
    "qhadamw": qhadamw,
    "scion-sign": scion_sign,
    "scion-spectral": scion_spectral,
    "sgd": sgd,
    "soap": soap,
}
