"""The limit of each optimizer, against the optimizer itself on a quadratic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from optimizers.build import build_optimizer
from optimizers.catalogue import METHODS, check_options
from optimizers.theory.limits import momentum_limit

STEPS = 600


def grows(name: str, options: dict[str, Any], *, product: float, delay: int) -> bool:
    """Whether descent on w^2 / 2 with this learning rate times curvature grows in the second half of
    `STEPS`."""
    weight = nn.Parameter(torch.full((1,), 1e-40, dtype=torch.float64))
    # With an epsilon of 1, far above the gradient, Adam's preconditioner is constant.
    constant = {"eps": 1.0} if "eps" in METHODS[name].options else {}
    optimizer = build_optimizer(
        {"norm.weight": weight},
        name=name,
        lr=product,
        weight_decay=0.0,
        options=options | constant,
    )
    versions = [weight.detach().clone()]
    for _ in range(STEPS):
        weight.grad = versions[max(0, len(versions) - 1 - delay)].clone()
        optimizer.step()
        versions.append(weight.detach().clone())
    half = STEPS // 2
    middle, end = (torch.stack(versions[at - 50 : at]).abs().max() for at in (half, STEPS))
    return bool(end > middle)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adamw", {"beta1": 0.9}),
        ("qhadamw", {"beta1": 0.9, "momentum_weight": 0.6}),
        ("sgd", {"momentum": 0.8, "nesterov": False}),
        ("sgd", {"momentum": 0.8, "nesterov": True}),
        ("nadamw", {"beta1": 0.9, "momentum_decay": 0.0}),
        ("nadamw", {"beta1": 0.9, "momentum_decay": 1.0}),
        ("adan", {}),
        ("adan", {"beta1": 0.9, "beta2": 0.8}),
    ],
)
def test_the_optimizer_is_stable_below_its_limit_alone(
    name: str, options: dict[str, Any], delay: int
) -> None:
    settings = check_options(name, options)
    limit = momentum_limit(name, settings, step=STEPS, delay=delay, coefficient=0.0)
    assert limit is not None
    assert not grows(name, options, product=0.995 * limit, delay=delay)
    assert grows(name, options, product=1.005 * limit, delay=delay)


def test_error_feedback_and_steps_count() -> None:
    adamw = METHODS["adamw"].defaults
    assert momentum_limit("adamw", adamw, step=9, delay=1, coefficient=1.0) == pytest.approx(2.70, abs=0.01)
    # Without a decay of the gradient's change Adan's step is along plain momentum.
    plain = {**METHODS["adan"].defaults, "beta1": 0.9, "beta2": 0.0}
    assert momentum_limit("adan", plain, step=9, delay=1, coefficient=1.0) == pytest.approx(2.70, abs=0.01)
    nadamw = METHODS["nadamw"].defaults
    early, late = (momentum_limit("nadamw", nadamw, step=n, delay=1, coefficient=0.0) for n in (1, 10**5))
    assert (early, late) == pytest.approx((2.0, 9.1), abs=0.05)
    assert momentum_limit("lion", METHODS["lion"].defaults, step=9, delay=1, coefficient=0.0) is None


def test_the_limit_of_a_new_optimizer_follows_from_its_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "mine", replace(METHODS["qhadamw"], name="mine"))
    same = {"settings": check_options("qhadamw", {}), "step": 10, "delay": 1, "coefficient": 0.5}
    limit = momentum_limit("qhadamw", **same)
    assert limit is not None
    assert momentum_limit("mine", **same) == limit
