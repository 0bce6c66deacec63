"""Diagnostics against the full Hessian of a tiny model, and against updates that are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.single_process import batches, clip, step_gradient, whole_model
from support.small_runs import Rows, small_config
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import stages.diagnostics.measure
from optimizers.build import build_optimizer
from stages.config.run_config import RunConfig
from stages.diagnostics.curvature import hessian_product, largest_eigenvalue
from stages.diagnostics.held_batch import MICROBATCHES
from stages.model.head_loss import next_token_loss
from stages.shape.families import parameter_roles
from stages.trainer import replay
from stages.update.lr_schedule import learning_rate_factor


def tiny(text: Path, *, optimizer: str = "adamw") -> RunConfig:
    """Few enough parameters for a whole Hessian; the text is of letters and has no token above 122."""
    config = small_config(
        text=text, precision="float64", layers=2, steps=3, eval_interval=3, optimizer=optimizer
    )
    config.model = replace(
        config.model, width=4, heads=2, kv_heads=1, mlp_width=6, vocab_size=123, family="llama"
    )
    config.train.diagnostics = 3
    return config


class Reference:
    """Plain training in one process that keeps the last weights, and the moments by their formula.

    Those of Adam, or of Adan, whose second one is of g + look_ahead (g - g_previous).
    """

    def __init__(self, config: RunConfig, *, beta1: float, beta2: float, look_ahead: float) -> None:
        self.config = config
        self.module = whole_model(config, dtype=torch.float64)
        self.data = batches(config)
        named = dict(self.module.named_parameters())
        self.names = list(named)
        optimizer = build_optimizer(
            named,
            name=config.optimizer.name,
            lr=config.optimizer.lr,
            weight_decay=config.optimizer.weight_decay,
            options={},
            roles=parameter_roles(config.model, {name: p.ndim for name, p in named.items()}),
        )
        first = {name: torch.zeros_like(p) for name, p in named.items()}
        second = {name: torch.zeros_like(p) for name, p in named.items()}
        previous: dict[str, Tensor] = {}
        self.weights = [self._read()]
        for step in range(config.train.steps):
            gradient, _ = step_gradient(
                self.module, self.data, step=step, microbatches=config.schedule.microbatches
            )
            clip(gradient, config.train.clip_norm)
            factor = learning_rate_factor(config.optimizer, step=step, steps=config.train.steps)
            for group in optimizer.param_groups:
                group["lr"] = config.optimizer.lr * factor
            for name, parameter in named.items():
                parameter.grad = gradient[name]
                first[name] = beta1 * first[name] + (1 - beta1) * gradient[name]
                change = gradient[name] - previous.get(name, gradient[name])
                ahead = gradient[name] + look_ahead * change
                second[name] = beta2 * second[name] + (1 - beta2) * ahead**2
            previous = gradient
            optimizer.step()
            self.weights.append(self._read())
        steps = config.train.steps
        self.lr = config.optimizer.lr * factor
        self.momentum = self.flat({name: m / (1 - beta1**steps) for name, m in first.items()})
        self.step_size = {
            name: self.lr / ((v / (1 - beta2**steps)).sqrt() + 1e-8) for name, v in second.items()
        }

    def _read(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}

    def flat(self, values: dict[str, Tensor]) -> Tensor:
        return torch.cat([values[name].flatten() for name in self.names])

    def gradient(self, weights: dict[str, Tensor]) -> list[Tensor]:
        """Of the held loss, with a graph for a second backward, which fast attention lacks."""
        count = self.config.train.eval_microbatches
        held = [self.data.validation(index, count=count) for index in range(MICROBATCHES)]
        tokens, targets = (torch.cat(parts) for parts in zip(*held, strict=True))
        with sdpa_kernel(SDPBackend.MATH):
            loss = next_token_loss(functional_call(self.module, weights, (tokens,)), targets)
            return list(torch.autograd.grad(loss, list(weights.values()), create_graph=True))

    def hessian(self, names: list[str]) -> Tensor:
        """All second derivatives for these parameters, at the last weights."""
        weights = {name: value.requires_grad_() for name, value in self.weights[-1].items()}
        chosen = [self.names.index(name) for name in names]
        gradients = self.gradient(weights)
        flat = torch.cat([gradients[index].flatten() for index in chosen])
        parameters = [weights[name] for name in names]
        rows = torch.autograd.grad(flat, parameters, torch.eye(len(flat)).to(flat), is_grads_batched=True)
        return torch.cat([row.flatten(start_dim=1) for row in rows], dim=1)


def between(first: Tensor, second: Tensor) -> float:
    return float(torch.dot(first, second) / (first.norm() * second.norm()))


@pytest.mark.parametrize(
    ("optimizer", "beta1", "beta2", "look_ahead", "response"),
    [
        ("adamw", 0.9, 0.95, 0.0, 0.1 / 1.9),
        ("qhadamw", 0.95, 0.95, 0.0, 0.25 + 0.75 * 0.05 / 1.95),
        ("adan", 0.98, 0.99, 0.92, 0.02 / 1.98 + 0.92 * 2 * 0.08 / 1.92),
    ],
)
@pytest.mark.slow
def test_a_row_is_what_the_whole_hessian_says(
    optimizer: str,
    beta1: float,
    beta2: float,
    look_ahead: float,
    response: float,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`response` is the share of a gradient that alternates from update to update in the direction."""
    config = tiny(text, optimizer=optimizer)
    monkeypatch.setattr(stages.diagnostics.measure, "ITERATIONS", 60)  # all directions that matter
    rows = Rows()
    replay(config, recorder=rows)
    (row,) = rows.of_kind("diagnostics")
    reference = Reference(config, beta1=beta1, beta2=beta2, look_ahead=look_ahead)
    before, last = (reference.flat(weights) for weights in reference.weights[-2:])
    update, earlier = before - last, reference.flat(reference.weights[-3]) - before
    assert row["lr"] == pytest.approx(reference.lr)
    # Where the period is two updates; 38 for AdamW.
    assert row["limit"] == pytest.approx(2 / response)
    assert row["update_cosine"] == pytest.approx(between(update, earlier), rel=1e-9)
    gradients = [
        torch.cat(
            [g.detach().flatten() for g in reference.gradient({n: w.requires_grad_() for n, w in at.items()})]
        )
        for at in reference.weights[-2:]
    ]
    assert row["gradient_cosine"] == pytest.approx(between(*gradients), rel=1e-9)
    whole = reference.hessian(reference.names)
    along = torch.dot(update, whole @ update) / torch.dot(update, reference.momentum)
    # The rest is the finite difference's error.
    assert row["lr_sharpness_along_update"] == pytest.approx(float(along), rel=1e-6)
    sizes = {
        name: torch.zeros_like(size) if name == "embedding.weight" else size
        for name, size in reference.step_size.items()
    }
    roots = reference.flat(sizes).sqrt()
    expected = torch.linalg.eigvalsh(roots[:, None] * whole * roots)[-1]
    assert row["lr_sharpness"] == pytest.approx(float(expected), rel=1e-6)
    assert row["residual"] < 1e-4


def test_lanczos_finds_the_largest_eigenvalue_and_bounds_its_error() -> None:
    generator = torch.Generator().manual_seed(1)
    half = torch.randn(40, 40, generator=generator, dtype=torch.float64)
    matrix = half + half.T
    values = torch.linalg.eigvalsh(matrix)
    start = torch.randn(40, generator=generator, dtype=torch.float64)
    exact, residual = largest_eigenvalue(matrix.mv, start, iterations=40)
    assert exact == pytest.approx(float(values[-1]), rel=1e-12)
    assert residual < 1e-10
    for iterations in (1, 3, 8):
        value, residual = largest_eigenvalue(matrix.mv, start, iterations=iterations)
        assert value < exact
        assert float((values - value).abs().min()) <= residual * (1 + 1e-9)


def test_lanczos_ends_where_no_direction_is_left() -> None:
    matrix = torch.diag(torch.tensor([3.0, 3.0, -5.0], dtype=torch.float64))
    start = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)
    value, residual = largest_eigenvalue(matrix.mv, start, iterations=20)
    assert (value, residual) == pytest.approx((3.0, 0.0), abs=1e-9)


def test_a_product_with_the_hessian_is_exact_on_a_quadratic() -> None:
    matrix = torch.tensor([[2.0, 1.0], [1.0, -3.0]], dtype=torch.float64)
    point, direction = (torch.tensor(v, dtype=torch.float64) for v in ([5.0, 1.0], [1e3, -2e3]))
    product = hessian_product(matrix.mv, point, direction)
    torch.testing.assert_close(product, matrix @ direction, rtol=1e-9, atol=0)
