"""The measurements of `train.diagnostics` at a drain.

y are the evaluated weights, u = y_previous - y the latest update, H the Hessian and g the gradient of the
loss on the held batch, D the diagonal step u = D m that the optimizer takes along its momentum m:

    lr_sharpness               largest eigenvalue of D^(1/2) H D^(1/2) at y, the embedding left out: the
                               learning rate times the preconditioned sharpness (arXiv 2207.14484)
    lr_sharpness_along_update  u^T H u / u^T m: where u = D m the Rayleigh quotient of that matrix along u,
                               and defined without a diagonal D; all weights
    update_cosine              between u and the update before it
    gradient_cosine            between g at y and g at y_previous

The first two compare with the limit of `optimizers.theory.stability`, beyond which the momentum's iteration
grows along that direction (2 without momentum, arXiv 2103.00065).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from stages.data.batches import Batches
from stages.diagnostics.curvature import hessian_product, largest_eigenvalue
from stages.diagnostics.held_batch import HeldBatch
from stages.diagnostics.preconditioner import momenta, step_sizes
from stages.pipeline.build import Rank
from stages.pipeline.evaluation import evaluation_weights
from stages.update.optimizer_step import StageState
from stages.update.recorded_updates import RecordedUpdates

ITERATIONS = 12
"""Products with the Hessian for the largest eigenvalue."""

START_SEED = 0
"""Of the first vector, the same in every run."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The latest two updates of a stage on one data rank."""

    stage: int
    delay: int
    """Most updates between a gradient's weights and its update, since the last drain."""
    products: list[float] | None
    """u . u_previous, u . u and u_previous . u_previous; None before the second update."""


@dataclass(frozen=True, kw_only=True)
class Curvature:
    """What is measured on the held batch; None where it is not defined."""

    lr_sharpness: float | None
    residual: float | None
    """Of `lr_sharpness`, as a share of it."""
    lr_sharpness_along_update: float | None
    gradient_cosine: float | None


def turns(rank: Rank) -> list[Turn]:
    """The latest updates of the rank's stages."""
    return [
        Turn(stage=stage, delay=rank.executor.trace.stages[stage].delay_max or 0, products=_products(state))
        for stage, state in rank.stages.items()
    ]


def _products(state: StageState) -> list[float] | None:
    updates = state.update.correction
    if not isinstance(updates, RecordedUpdates) or updates.products is None:
        return None
    return [float(product) for product in updates.products]


def update_cosines(collected: Sequence[Turn]) -> tuple[float | None, list[float | None]]:
    """The cosine between the latest two updates: of all weights, and of each stage."""
    by_stage: dict[int, list[list[float] | None]] = {}
    for turn in collected:
        by_stage.setdefault(turn.stage, []).append(turn.products)
    every = [products for _, of_stage in sorted(by_stage.items()) for products in of_stage]
    return _cosine(every), [_cosine(of_stage) for _, of_stage in sorted(by_stage.items())]


def _cosine(products: Sequence[list[float] | None]) -> float | None:
    known = [each for each in products if each is not None]
    if len(known) < len(products):
        return None
    across, first, second = (sum(values) for values in zip(*known, strict=True))
    return across / math.sqrt(first * second) if first * second > 0 else None


def curvature(
    stages: Sequence[Sequence[StageState]],
    batches: Batches,
    *,
    eval_microbatches: int,
    on_gradient: Callable[[], None],
) -> Curvature:
    """Measure the whole model on the held batch.

    Args:
        stages: for each stage in order, its state on every data rank.
        batches: source of the validation data.
        eval_microbatches: micro-batches of an evaluation.
        on_gradient: called when a gradient of the held batch begins.
    """
    held = HeldBatch(
        [data_ranks[0] for data_ranks in stages], batches, count=eval_microbatches, on_gradient=on_gradient
    )
    states = [state for data_ranks in stages for state in data_ranks]
    point = held.vector(_merged([evaluation_weights(state, dtype=torch.float64) for state in states]))
    update = _vector(held, [_latest(state) for state in states])
    momentum = _vector(held, [momenta(state) for state in states])
    sizes = _vector(held, [step_sizes(state) for state in states])
    product = partial(hessian_product, held.gradient, point)
    along = cosine = None
    if update is not None and update.norm() > 0:
        cosine = _between(held.gradient(point), held.gradient(point + update))
        if momentum is not None:
            along = _finite(torch.dot(update, product(update)) / torch.dot(update, momentum))
    value = residual = None
    if sizes is not None and sizes.norm() > 0:
        roots = sizes.sqrt()
        start = torch.randn(
            len(point), generator=torch.Generator().manual_seed(START_SEED), dtype=torch.float64
        )
        value, residual = largest_eigenvalue(
            lambda vector: roots * product(roots * vector), start.to(point.device), iterations=ITERATIONS
        )
        residual = residual / abs(value) if value else None
    return Curvature(
        lr_sharpness=value, residual=residual, lr_sharpness_along_update=along, gradient_cosine=cosine
    )


def _latest(state: StageState) -> dict[str, Tensor] | None:
    """The stage's latest update, by member."""
    updates = state.update.correction
    if not isinstance(updates, RecordedUpdates):
        return None
    names = state.weights.master.names
    return dict(zip(names, updates.latest, strict=True)) if len(updates.latest) == len(names) else None


def _vector(held: HeldBatch, parts: Sequence[Mapping[str, Tensor] | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return held.vector(_merged(known)) if len(known) == len(parts) else None


def _merged(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for part in parts for name, tensor in part.items()}


def _between(first: Tensor, second: Tensor) -> float | None:
    return _finite(torch.dot(first, second) / (first.norm() * second.norm()))


def _finite(value: Tensor) -> float | None:
    return float(value) if bool(torch.isfinite(value)) else None
