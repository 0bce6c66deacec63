"""Bases are what they should be, and basis rotation meets SOAP and Adam where the methods coincide."""

from __future__ import annotations

import pytest
import torch
from support.optimizer_references import parameters

from optimizers.build import build_optimizer
from optimizers.rules.basis_rotation import stage_aware_intervals

SQUARE = "blocks.0.attention.wq.weight"
WIDE = "blocks.0.mlp.down.weight"
TALL = "blocks.0.mlp.up.weight"


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", [SQUARE, WIDE, TALL])
@pytest.mark.parametrize("source", ["second-moment", "first-moment"])
def test_first_bases_diagonalize_the_first_gradient(name: str, source: str) -> None:
    weight = parameters()[name]
    optimizer = build_optimizer(
        {name: weight}, name="basis-rotation", lr=1e-2, weight_decay=0.0, options={"source": source}
    )
    weight.grad = draw(*weight.shape, seed=5)
    optimizer.step()
    state = optimizer.state[weight]
    rotated = state["left_basis"].T @ weight.grad @ state["right_basis"]
    rank = min(weight.shape)
    diagonal = torch.zeros_like(rotated)
    diagonal[:rank, :rank] = torch.diag(rotated.diagonal())
    torch.testing.assert_close(rotated, diagonal, rtol=0, atol=1e-7)
    assert bool((rotated.diagonal().abs().diff() <= 0).all())


def test_basis_rotation_is_adam_in_the_rotated_basis() -> None:
    """torch's Adam on coordinates Y with W = U Y V^T; at a refresh its first moment is carried over through
    W's basis.

    The second moment goes with its rows and columns: which old basis vector a new one is, the largest overlap
    tells.
    """
    interval, steps, eps = 5, 20, 1e-3
    weight = parameters()[SQUARE]
    still = draw(*weight.shape, seed=9)
    options = {"refresh_interval": interval, "beta1": 0.9, "beta2": 0.95, "eps": eps}
    ours = build_optimizer(
        {SQUARE: weight}, name="basis-rotation", lr=1e-2, weight_decay=0.0, options=options
    )
    coordinates = torch.nn.Parameter(torch.zeros_like(weight))
    adam = torch.optim.Adam([coordinates], lr=1e-2, betas=(0.9, 0.95), eps=eps, foreach=False)
    w = weight.detach().clone()
    u = v = torch.empty(0)
    for step in range(steps):
        gradient = still + 0.1 * draw(*weight.shape, seed=10 + step)
        weight.grad = gradient.clone()
        ours.step()
        new_u, new_v = (ours.state[weight][f"{side}_basis"].clone() for side in ("left", "right"))
        if step > 0 and step % interval == 0:
            rows, columns = ((old.T @ new).abs().argmax(0) for old, new in ((u, new_u), (v, new_v)))
            assert sorted(rows.tolist()) == sorted(columns.tolist()) == list(range(6))
            state = adam.state[coordinates]
            state["exp_avg"].copy_(new_u.T @ u @ state["exp_avg"] @ v.T @ new_v)
            state["exp_avg_sq"].copy_(state["exp_avg_sq"][rows][:, columns])
        u, v = new_u, new_v
        with torch.no_grad():
            coordinates.copy_(u.T @ w @ v)
        coordinates.grad = u.T @ gradient @ v
        adam.step()
        w = u @ coordinates.detach() @ v.T
    torch.testing.assert_close(weight.detach(), w, rtol=1e-10, atol=1e-10)


def test_stage_aware_refresh_spends_the_same_budget_earlier() -> None:
    delays = [3, 2, 1, 0]
    intervals = stage_aware_intervals(10, delays)
    assert intervals == sorted(intervals)
    assert intervals[0] < 10 < intervals[-1]
    budget = sum(1 / interval for interval in intervals)
    assert budget == pytest.approx(4 / 10, rel=0.05)
    assert stage_aware_intervals(10, [1, 1]) == [10, 10]
    assert min(stage_aware_intervals(1, delays)) == 1


def test_a_stage_refreshes_as_often_as_its_delay_asks() -> None:
    intervals = []
    for stage in range(3):
        optimizer = build_optimizer(
            {SQUARE: parameters()[SQUARE]},
            name="basis-rotation",
            lr=1e-2,
            weight_decay=0.0,
            options={"stage_aware": True, "refresh_interval": 6},
            stage=stage,
            delays=(2, 1, 0),
        )
        intervals.append(optimizer.param_groups[0]["refresh_interval"])
    assert intervals == stage_aware_intervals(6, (2, 1, 0)) == [4, 6, 12]


@pytest.mark.parametrize("shape", [(4, 64), (64, 4)])
@pytest.mark.parametrize("name", ["soap", "basis-rotation"])
def test_axes_beyond_the_rank_of_few_gradients_do_not_come_from_rounding(
    name: str, shape: tuple[int, int]
) -> None:
    """Eleven gradients of 4 x 64 have a rank of 44 at the first refresh. Rounding filled the other axes, and
    where gradients differed by rounding weights differed by a twentieth of a step."""
    weights = [torch.nn.Parameter(draw(*shape)) for _ in range(2)]
    optimizers = [
        build_optimizer({SQUARE: weight}, name=name, lr=1e-2, weight_decay=0.0, options={})
        for weight in weights
    ]
    for step in range(25):
        gradient = draw(*shape, seed=step)
        for weight, optimizer, rounding in zip(weights, optimizers, (0.0, 1e-15), strict=True):
            weight.grad = gradient * (1 + rounding * draw(*shape, seed=100 + step))
            optimizer.step()
    # Bases are exact to eps^(1/4) (`in_range`).
    torch.testing.assert_close(
        weights[0], weights[1], rtol=0, atol=1e-2 * torch.finfo(torch.float64).eps ** 0.25
    )
