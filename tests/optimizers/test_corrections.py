"""Error feedback: the recurrence written out, its two forms, what it keeps, and what it starts and skips
with."""

from __future__ import annotations

import pytest
import torch
from support.optimizer_references import error_feedback
from support.optimizer_references import parameters as all_parameters
from torch import Tensor

import optimizers
from optimizers.build import build_optimizer
from optimizers.corrections.base import Correction, PlainUpdate
from optimizers.corrections.error_feedback import LookAheadErrorFeedback

STEPS = 100
Weights = dict[str, torch.nn.Parameter]


def parameters() -> Weights:
    """One of each role and a second shape, to keep the steps quick."""
    chosen = ("embedding", "blocks.0.attention.wq", "blocks.0.mlp", "norm", "head")
    return {name: weight for name, weight in all_parameters().items() if name.startswith(chosen)}


def loss_gradient(weights: list[Tensor]) -> list[Tensor]:
    """Of a smooth loss with a valley at a fixed place for each entry."""
    return [weight - torch.sin(3 * weight) / 6 - 0.3 for weight in weights]


def optimizer_for(weights: Weights, name: str, weight_decay: float = 0.1) -> torch.optim.Optimizer:
    lr = 2e-4 if name in ("scion", "lion") else 5e-3
    eps = {"eps": 1e-4} if "eps" in optimizers.METHODS[name].options else {}
    return build_optimizer(weights, name=name, lr=lr, weight_decay=weight_decay, options=eps)


def set_rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * (1 - 0.5 * step / STEPS)


def train(
    name: str,
    correction: Correction,
    *,
    steps: int = STEPS,
    skipped: tuple[int, ...] = (),
    weight_decay: float = 0.1,
    replica_dtype: torch.dtype = torch.float64,
) -> tuple[list[Tensor], list[Tensor], torch.optim.Optimizer]:
    """Delay 1 with a replica for each version: the weights computed with last, those to evaluate, the
    optimizer."""
    weights = parameters()
    master = list(weights.values())
    optimizer = optimizer_for(weights, name, weight_decay)
    versions = [[weight.detach().clone().to(replica_dtype) for weight in master] for _ in range(2)]
    for step in range(steps):
        set_rate(optimizer, step)
        for weight, gradient in zip(master, loss_gradient(versions[0]), strict=True):
            weight.grad = gradient.double()
        if step in skipped:
            correction.skip(master=master, replica=versions[0])
        else:
            correction.update(optimizer=optimizer, master=master, replica=versions[0])
        versions.reverse()
    return versions[1], list(correction.evaluation_weights(master)), optimizer


def written_out(name: str, c: float, decay_at: str, weight_decay: float) -> tuple[list[Tensor], list[Tensor]]:
    """x' = x - u - c (u - u_previous), with u asked of an optimizer that stands at y or at x."""
    weights = parameters()
    tensors = list(weights.values())
    optimizer = optimizer_for(weights, name, weight_decay)
    x = [weight.detach().clone() for weight in tensors]
    earlier, previous = x, None
    for step in range(STEPS):
        set_rate(optimizer, step)
        at = x
        if previous is not None and decay_at == "y":
            at = [here + c * u for here, u in zip(x, previous, strict=True)]
        for weight, start, gradient in zip(tensors, at, loss_gradient(earlier), strict=True):
            weight.data.copy_(start)
            weight.grad = gradient
        optimizer.step()
        u = [start - weight.detach() for start, weight in zip(at, tensors, strict=True)]
        error = [torch.zeros_like(now) for now in u] if previous is None else None
        error = error or [now - before for now, before in zip(u, previous, strict=True)]
        earlier, x = x, [here - now - c * e for here, now, e in zip(x, u, error, strict=True)]
        previous = u
    return x, [here + c * u for here, u in zip(x, previous, strict=True)]


def assert_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-12) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("c", [0.5, 1.0])
@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
@pytest.mark.parametrize(("form", "decay_at"), [("look-ahead", "y"), ("buffered", "y"), ("buffered", "x")])
def test_follows_the_recurrence(name: str, c: float, form: str, decay_at: str) -> None:
    x, y, _ = train(name, error_feedback(c, form, **({"decay_at": decay_at} if form == "buffered" else {})))
    expected_x, expected_y = written_out(name, c, decay_at, weight_decay=0.1)
    assert_close(x, expected_x)
    assert_close(y, expected_y)


@pytest.mark.parametrize(
    ("name", "c"), [*((name, 1.0) for name in optimizers.NAMES), ("muon", 0.3), ("adamw", 1.7)]
)
def test_the_two_forms_agree(name: str, c: float) -> None:
    """Over 100 steps with a changing rate, weight decay and steps left out."""
    first, second = (
        train(name, error_feedback(c, form=form), skipped=(0, 30, 31, 99))
        for form in ("look-ahead", "buffered")
    )
    assert_close(first[0], second[0])
    assert_close(first[1], second[1])


@pytest.mark.parametrize("name", optimizers.NAMES)
def test_coefficient_zero_is_plain_delay_to_the_bit(name: str) -> None:
    assert isinstance(error_feedback(0.0), PlainUpdate)
    plain, _, _ = train(name, PlainUpdate(), steps=12, skipped=(7,))
    zero, _, _ = train(name, LookAheadErrorFeedback(0.0), steps=12, skipped=(7,))
    assert all(torch.equal(a, b) for a, b in zip(plain, zero, strict=True))


def test_the_first_update_is_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _, _ = train("adamw", error_feedback(1.0), steps=2)
    monkeypatch.setattr("optimizers.corrections.error_feedback.PART", 7)
    in_parts, _, _ = train("adamw", error_feedback(1.0), steps=2)
    assert all(torch.equal(a, b) for a, b in zip(whole, in_parts, strict=True))


def test_a_smaller_replica_gets_the_same_weights_rounded() -> None:
    for steps in (1, 5):
        weights = parameters()
        master = list(weights.values())
        optimizer = optimizer_for(weights, "muon")
        correction, wide = error_feedback(1.0), error_feedback(1.0)
        small = [torch.zeros_like(weight, dtype=torch.bfloat16) for weight in master]
        twins = parameters()
        same = [torch.zeros_like(weight) for weight in twins.values()]
        twin_optimizer = optimizer_for(twins, "muon")
        for _ in range(steps):
            for weight, twin in zip(master, twins.values(), strict=True):
                (gradient,) = loss_gradient([weight.detach()])
                weight.grad = twin.grad = gradient
            correction.update(optimizer=optimizer, master=master, replica=small)
            wide.update(optimizer=twin_optimizer, master=list(twins.values()), replica=same)
        for rounded, exact in zip(small, same, strict=True):
            assert torch.equal(rounded, exact.to(torch.bfloat16))
        for weight, twin in zip(master, twins.values(), strict=True):
            assert torch.equal(weight, twin)


def test_a_state_of_the_other_form_is_refused() -> None:
    saved = error_feedback(1.0, form="buffered").state_dict()
    for correction in (error_feedback(0.0), error_feedback(1.0)):
        with pytest.raises(ValueError, match="buffered"):
            correction.load_state_dict(saved)
