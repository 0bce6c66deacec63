"""What optimizers and corrections keep: how many bytes, and that a resumed run goes on bit for bit."""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import pytest
import torch
from support.optimizer_references import SHAPES, error_feedback, gradients, parameters
from torch import Tensor

import optimizers
from optimizers.build import build_optimizer
from optimizers.corrections.base import Correction, PlainUpdate
from optimizers.corrections.catalogue import CORRECTIONS
from optimizers.corrections.discrepancy import DiscrepancyCorrection
from optimizers.corrections.lr_discount import LrDiscount
from optimizers.corrections.weight_prediction import WeightPrediction

BUILT: dict[str, Callable[[], Correction]] = {
    "none": PlainUpdate,
    "error-feedback": lambda: error_feedback(1.0),
    "error-feedback-buffered": lambda: error_feedback(1.0, form="buffered"),
    "weight-prediction": lambda: WeightPrediction(2.0),
    "lr-discount": lambda: LrDiscount(error_feedback(0.5), delay=3, anneal=5),
    "discrepancy": lambda: DiscrepancyCorrection(2),
}
"""Delay compensation keeps nothing: it is a function."""


def run(
    optimizer: torch.optim.Optimizer,
    correction: Correction,
    weights: dict[str, torch.nn.Parameter],
    steps: dict[str, list[Tensor]],
    span: range,
) -> list[Tensor]:
    replica = [torch.empty_like(weight) for weight in weights.values()]
    for step in span:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * math.exp(-step / 10)
        for name, weight in weights.items():
            weight.grad = steps[name][step]
        if step == 4:
            correction.skip(master=list(weights.values()), replica=replica)
        else:
            correction.update(optimizer=optimizer, master=list(weights.values()), replica=replica)
    return replica


def build(name: str, weights: dict[str, torch.nn.Parameter], **options: str) -> torch.optim.Optimizer:
    return build_optimizer(weights, name=name, lr=1e-3, weight_decay=0.1, options=options)


@pytest.mark.parametrize("correction", BUILT)
@pytest.mark.parametrize("name", optimizers.NAMES)
def test_resuming_is_bit_exact(name: str, correction: str) -> None:
    """Save after 9 of 14 steps, through a file read with `weights_only`, into freshly built objects."""
    steps = gradients(14, torch.float32)
    weights = parameters(torch.float32)
    optimizer, kept = build(name, weights), BUILT[correction]()
    run(optimizer, kept, weights, steps, range(9))
    file = io.BytesIO()
    saved = {"optimizer": optimizer.state_dict(), "correction": kept.state_dict()}
    torch.save({"weights": dict(weights), **saved}, file)
    straight = run(optimizer, kept, weights, steps, range(9, 14))

    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    again = parameters(torch.float32, seed=99)
    with torch.no_grad():
        for key, weight in again.items():
            weight.copy_(loaded["weights"][key])
    fresh, resumed = build(name, again), BUILT[correction]()
    fresh.load_state_dict(loaded["optimizer"])
    resumed.load_state_dict(loaded["correction"])
    for mine, theirs in zip(run(fresh, resumed, again, steps, range(9, 14)), straight, strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(resumed.evaluation_weights(list(again.values())), weights.values(), strict=True):
        assert correction == "error-feedback-buffered" or torch.equal(mine, theirs)


def held_bytes(held: object) -> int:
    """Bytes of the tensors that hang on an object, step counters and other single numbers left out."""
    if isinstance(held, Tensor):
        return held.nbytes if held.numel() > 1 else 0
    if isinstance(held, dict):
        return sum(held_bytes(value) for value in held.values())
    if isinstance(held, list | tuple):
        return sum(held_bytes(value) for value in held)
    return 0


def bytes_of_a_matrix(
    name: str, rows: int, columns: int, *, correction: str = "none", **options: str
) -> tuple[int, int]:
    """Of the optimizer's state and of the correction's, of a matrix in a block, in float32."""
    weights = {"blocks.0.mlp.up.weight": torch.nn.Parameter(torch.randn(rows, columns))}
    optimizer, kept = build(name, weights, **options), BUILT[correction]()
    run(optimizer, kept, weights, {key: list(torch.randn(3, rows, columns)) for key in weights}, range(3))
    return held_bytes(dict(optimizer.state)), held_bytes(vars(kept))


@pytest.mark.parametrize("correction", BUILT)
@pytest.mark.parametrize("name", optimizers.NAMES)
def test_memory_is_what_the_list_says(name: str, correction: str) -> None:
    of_optimizer, of_correction = bytes_of_a_matrix(name, 64, 64, correction=correction)
    rows = 64 * 4 if name == "normuon" else 0
    assert of_optimizer == optimizers.METHODS[name].state_bytes_per_parameter * 64 * 64 + rows
    inner = "error-feedback" if correction == "lr-discount" else correction
    per_parameter = 0.0 if inner == "none" else CORRECTIONS[inner].state_bytes_per_parameter
    assert of_correction == per_parameter * 64 * 64


@pytest.mark.parametrize(
    ("name", "options", "formula"),
    [
        *((name, {}, method.matrix_state) for name, method in optimizers.METHODS.items()),
        ("basis-rotation", {"source": "first-moment"}, "2 rows columns + rows^2 + columns^2"),
        ("basis-rotation", {"geometry": "unilateral"}, "2 rows columns + 2 rows^2"),
        ("basis-rotation", {"source": "first-moment", "geometry": "unilateral"}, "2 rows columns + rows^2"),
    ],
)
def test_memory_of_a_matrix_follows_its_formula(name: str, options: dict[str, str], formula: str) -> None:
    rows, columns = 24, 40
    factors = {"rows^2": rows**2, "columns^2": columns**2, "rows columns": rows * columns, "rows": rows}
    expected = 0
    for term in formula.split(" + "):
        count, _, rest = term.partition(" ")
        expected += int(count) * factors[rest] if count.isdigit() else factors[term]
    assert bytes_of_a_matrix(name, rows, columns, **options) == (4 * expected, 0)


@pytest.mark.parametrize(
    "held", [["embedding.weight"], ["norm.weight"], ["blocks.0.mlp.up.weight"], list(SHAPES)]
)
@pytest.mark.parametrize("name", optimizers.NAMES)
def test_a_stage_with_only_some_roles_works(name: str, held: list[str]) -> None:
    weights = {key: weight for key, weight in parameters().items() if key in held}
    optimizer = build(name, weights)
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    before = [weight.detach().clone() for weight in weights.values()]
    for _ in range(2):
        optimizer.step()
    assert all(not torch.equal(old, new) for old, new in zip(before, weights.values(), strict=True))
    listed = [key for group in optimizer.param_groups for key in group["param_names"]]
    assert sorted(listed) == sorted(held)
    assert all(group["peak_lr"] == group["lr"] for group in optimizer.param_groups)


def test_a_rate_written_into_a_group_reaches_its_rule() -> None:
    weights = parameters()
    optimizer = build("muon", weights)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    before = {key: weight.detach().clone() for key, weight in weights.items()}
    optimizer.step()
    assert all(torch.equal(before[key], weight) for key, weight in weights.items())
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"]
    optimizer.step()
    assert all(not torch.equal(before[key], weight) for key, weight in weights.items())


def test_parameters_without_a_gradient_stay() -> None:
    for name in optimizers.NAMES:
        weights = parameters()
        optimizer = build(name, weights)
        optimizer.step()
        assert not any(optimizer.state.values())
        for key, start in parameters().items():
            assert torch.equal(weights[key], start)


def test_closures_are_refused() -> None:
    optimizer = build("muon", parameters())
    with pytest.raises(ValueError, match="no closure"):
        optimizer.step(lambda: 0.0)
