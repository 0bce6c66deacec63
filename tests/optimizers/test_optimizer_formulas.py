"""Every optimizer against its formula written out, and against torch and pytorch_optimizer where they have
it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from support.optimizer_references import RULES, gradients, parameters, rates
from torch import Tensor

import optimizers
from optimizers.build import build_optimizer

STEPS = 20
ROTATIONS = {"soap", "basis-rotation"}
FLOAT32_EPS = 1e-3
"""For the rotations in float32: the first gradient is diagonal in its own basis, and what stands beside the
diagonal is rounding (about 1e-7), which an eps of 1e-8 would blow up to steps of full size."""

Options = Mapping[str, float | bool | str]
VARIANTS: list[tuple[str, Options]] = [
    *((name, {}) for name in optimizers.NAMES),
    ("sgd", {"nesterov": True}),
    ("sgd", {"momentum": 0.0}),
    ("adamw", {"beta1": 0.8, "beta2": 0.999, "eps": 1e-6}),
    ("qhadamw", {"beta1": 0.9, "momentum_weight": 0.3}),
    ("muon", {"nesterov": False, "scale": "original", "auxiliary_lr_ratio": 0.015}),
    ("muon", {"iteration": "polar-express", "momentum": 0.9}),
    ("muon", {"iteration": "gram"}),
    ("normuon", {"nesterov": False, "row_beta2": 0.8}),
    ("normuon", {"scale": "original"}),
    ("mars", {"vector_beta1": 0.8, "vector_beta2": 0.999}),
    ("scion", {"constrained": True}),
    ("soap", {"refresh_interval": 3}),
    ("basis-rotation", {"refresh_interval": 2}),
    ("basis-rotation", {"geometry": "unilateral", "refresh_interval": 3}),
    ("basis-rotation", {"source": "first-moment", "refresh_interval": 3}),
    ("basis-rotation", {"source": "first-moment", "geometry": "unilateral", "refresh_interval": 3}),
]


def peak_of(name: str) -> float:
    return 2e-4 if name in ("scion", "lion") else 1e-2


def run(
    name: str, options: Options, *, dtype: torch.dtype, weight_decay: float
) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """The end weights, and where the rule rotates, the bases of the first step."""
    weights, steps = parameters(dtype), gradients(STEPS, dtype)
    optimizer = build_optimizer(
        weights, name=name, lr=peak_of(name), weight_decay=weight_decay, options=options
    )
    bases = {}
    for step, rate in enumerate(rates(STEPS, 1.0)):
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * rate
        for key, weight in weights.items():
            weight.grad = steps[key][step].clone()
        optimizer.step()
        for key, weight in weights.items():
            assert torch.equal(weight.grad, steps[key][step]), f"the gradient of {key} was changed"
            if step == 0 and (optimizer.state[weight].keys() & {"left_basis", "right_basis"}):
                left = optimizer.state[weight].get("left_basis", torch.eye(weight.shape[0]))
                right = optimizer.state[weight].get("right_basis", torch.eye(weight.shape[1]))
                bases[key] = (left.double().clone(), right.double().clone())
    return {key: weight.detach().double() for key, weight in weights.items()}, bases


@pytest.mark.parametrize(
    ("dtype", "tolerance", "weight_decay"), [(torch.float64, 1e-10, 0.3), (torch.float32, 1e-5, 0.0)]
)
@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_steps_follow_the_formula(
    name: str, options: Options, weight_decay: float, dtype: torch.dtype, tolerance: float
) -> None:
    if name in ROTATIONS and dtype is torch.float32:
        options = {**options, "eps": FLOAT32_EPS}
    ours, bases = run(name, options, dtype=dtype, weight_decay=weight_decay)
    weights, steps = parameters(dtype), gradients(STEPS, dtype)
    settings = optimizers.check_options(name, options)
    groups = optimizers.assign(
        name, {key: optimizers.role_of(key, weight.ndim) for key, weight in weights.items()}
    )
    assert sorted(key for group in groups for key in group.names) == sorted(weights)
    for group in groups:
        ratio = settings.get("auxiliary_lr_ratio", 1.0) if group.rule == "adamw" else 1.0
        # MARS names the rates of its AdamW part apart.
        of_vectors = {
            key.removeprefix("vector_"): value for key, value in settings.items() if key.startswith("vector_")
        }
        rates_of_group = of_vectors if group.rule == "adamw" else {}
        for key in group.names:
            reference = RULES[group.rule](
                weights[key].detach().double(),
                list(
                    zip(
                        map(torch.Tensor.double, steps[key]), rates(STEPS, peak_of(name) * ratio), strict=True
                    )
                ),
                weight_decay if group.decayed else 0.0,
                **(settings | rates_of_group),
                **({"first_bases": bases[key]} if key in bases else {}),
            )
            torch.testing.assert_close(ours[key], reference, rtol=tolerance, atol=tolerance)


EXPERTS = ("blocks.0.attention.wq.weight", "blocks.1.attention.wq.weight")
"""Two matrices of one shape, updated as one batch."""

WITHOUT_MOMENTUM: list[tuple[str, Options]] = [
    (name, {key: 0.0})
    for name, method in optimizers.METHODS.items()
    for key in ("momentum", "beta1")
    if key in method.options and (name, key) != ("sgd", "momentum")
]


def precisions(name: str) -> tuple[str, ...]:
    """Rotations are exact in float64 alone; rules without `precision` compute in the master copy's type."""
    if name in ROTATIONS:
        return "float64", "float32"
    return ("float32", "bfloat16") if "precision" in optimizers.METHODS[name].options else ("float32",)


@pytest.mark.parametrize("empty", ["all", "expert", "row and column"])
@pytest.mark.parametrize(
    ("name", "options", "precision"),
    [
        (*variant, precision)
        for variant in [*VARIANTS, *WITHOUT_MOMENTUM]
        for precision in precisions(variant[0])
    ],
    ids=str,
)
def test_what_gets_no_gradient_only_decays(name: str, options: Options, empty: str, precision: str) -> None:
    """Zeros for three steps, then (but in a row and a column) gradients as for everybody else."""
    if precision == "bfloat16":
        options = {**options, "precision": "bfloat16"}
    dtype = torch.float64 if precision == "float64" else torch.float32
    peak, decay, idle, steps = peak_of(name), 0.3, 3, gradients(8, dtype)
    for key, own in steps.items():
        for step, gradient in enumerate(own):
            if (empty == "all" or (empty == "expert" and key == EXPERTS[0])) and step < idle:
                gradient.zero_()
            elif empty == "row and column" and gradient.ndim == 2:
                gradient[2] = gradient[:, 2] = 0
    rounding = 0.0
    if name in ROTATIONS:
        # Eight steps of a zero that is rotated: two sums of nine products of up to about 3. In float32
        # an eigenvector of a small eigenvalue has more of it.
        options = {**options, "eps": FLOAT32_EPS}
        rounding = 8 * peak / FLOAT32_EPS * 2 * 9 * 3 * torch.finfo(dtype).eps
        rounding = rounding if dtype == torch.float64 else float("inf")
    weights = parameters(dtype)
    optimizer = build_optimizer(weights, name=name, lr=peak, weight_decay=decay, options=options)
    # The first gradient only sets SOAP's bases.
    first = int(name == "soap")
    for step in range(8):
        for key, weight in weights.items():
            weight.grad = steps[key][step]
        optimizer.step()
        for group in optimizer.param_groups:
            kept = (1 - group["lr"] * group["weight_decay"]) ** (step + 1 - first * (group["rule"] == "soap"))
            for key, weight in zip(group["param_names"], group["params"], strict=True):
                start = parameters(dtype)[key].detach() * kept
                assert bool(weight.isfinite().all()), f"{key} after step {step}"
                state = optimizer.state[weight].values()
                assert all(bool(held.isfinite().all()) for held in state if isinstance(held, Tensor))
                if (empty == "all" or (empty == "expert" and key == EXPERTS[0])) and step < idle:
                    torch.testing.assert_close(weight.detach(), start, rtol=1e-6, atol=rounding)
                elif empty == "row and column" and weight.ndim == 2:
                    for there in (2, (slice(None), 2)):
                        torch.testing.assert_close(
                            weight.detach()[there], start[there], rtol=1e-6, atol=rounding
                        )
    assert not torch.equal(weights[EXPERTS[0]].detach(), parameters(dtype)[EXPERTS[0]].detach() * kept)
