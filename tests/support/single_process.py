"""Reference training: the whole model in one process, with plain autograd."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.small_runs import Rows, ranks_with, replayed
from torch import Tensor

from optimizers.build import build_optimizer
from stages.comm.topology import connect_in_process
from stages.config.run_config import RunConfig, optimizer_options
from stages.config.segments import segment_program
from stages.data.batches import Batches
from stages.data.dataset import prepare
from stages.model.decoder import Stage, initialise
from stages.model.head_loss import next_token_loss
from stages.pipeline.executor import drive
from stages.shape.families import parameter_roles
from stages.shape.head import split_name
from stages.shape.parametrization import growth_of
from stages.shape.partition import cut_model
from stages.training_loop import broadcast_initial_weights
from stages.update.balance import LoadTally
from stages.update.lr_schedule import learning_rate_factor
from stages.update.optimizer_step import UpdateResult
from stages.weights.flat_buffers import GradientBuffer
from stages.weights.weight_versions import Replica, WeightVersions

Weights = dict[str, Tensor]


def whole_model(config: RunConfig, *, dtype: torch.dtype) -> Stage:
    (cut,) = cut_model(config.model, stages=1, context=config.data.context)
    module = Stage(config.model, cut, context=config.data.context).to(dtype)
    module.prepare(device=torch.device("cpu"), dtype=dtype)
    for name, parameter in module.named_parameters():
        initialise(parameter, name=name, seed=config.seed, model=config.model)
    return module


def batches(config: RunConfig) -> Batches:
    return Batches(config, prepare(config.data), device=torch.device("cpu"))


def step_gradient(module: Stage, data: Batches, *, step: int, microbatches: int) -> tuple[Weights, float]:
    """Gradient and value of the mean loss over the micro-batches of one step, taken as one batch."""
    numbers = range(step * microbatches, (step + 1) * microbatches)
    tokens = torch.cat([data.tokens(number) for number in numbers])
    targets = torch.cat([data.targets(number) for number in numbers])
    loss = next_token_loss(module(tokens), targets)
    named = dict(module.named_parameters())
    gradients = torch.autograd.grad(loss, list(named.values()))
    return dict(zip(named, gradients, strict=True)), float(loss.detach())


def first_step_gradient(config: RunConfig) -> Weights:
    """That of the first step over all data ranks; of a tied matrix, the sum over both uses in an untied
    model."""
    tied = config.model.tied
    config = replace(config, model=replace(config.model, tied=False))
    module = whole_model(config, dtype=torch.float64)
    if tied:
        assert module.head is not None
        assert module.embedding is not None
        with torch.no_grad():
            module.head.weight.copy_(module.embedding.weight)
    microbatches = config.schedule.microbatches * config.parallel.data
    gradient, _ = step_gradient(module, batches(config), step=0, microbatches=microbatches)
    if tied:
        uses = gradient.pop("head.weight"), gradient["embedding.weight"]
        assert min(float(use.abs().max()) for use in uses) > 1e-4
        gradient["embedding.weight"] = sum(uses)
    return gradient


def clip(gradient: Weights, limit: float) -> float:
    """Scale `gradient` in place to a norm of at most `limit`; returns its norm before."""
    norm = float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradient.values()])))
    for g in gradient.values():
        g.mul_(min(1.0, limit / (norm + 1e-6)))
    return norm


def delayed_training(
    config: RunConfig,
    *,
    delay: int,
    skipped: frozenset[int] = frozenset(),
    synchronous_steps: int = 0,
    compensation: float = 0.0,
) -> tuple[Weights, list[float], list[float]]:
    """W(t+1) = W(t) - update(gradient at W(max(t - delay, 0))), with error feedback.

    Args:
        config: The run's configuration.
        delay: Updates between the weights of a gradient and those it is applied to.
        skipped: Steps whose update is zero.
        synchronous_steps: Number of first steps without delay.
        compensation: lambda of DC-ASGD: g + lambda g g (W(t) - W(t - delay)).

    Returns:
        The weights y that are evaluated, the loss of each step, the gradient norm of each step.
    """
    module = whole_model(config, dtype=getattr(torch, config.train.precision))
    data = batches(config)
    named = dict(module.named_parameters())
    optimizer = build_optimizer(
        named,
        name=config.optimizer.name,
        lr=config.optimizer.lr,
        weight_decay=config.optimizer.weight_decay,
        options=optimizer_options(config.optimizer),
        roles=parameter_roles(config.model, {name: parameter.ndim for name, parameter in named.items()}),
        growth=growth_of(config.model),
    )
    c = config.error_feedback.coefficient

    def read() -> Weights:
        return {name: p.detach().clone() for name, p in named.items()}

    def put(weights: Weights) -> None:
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(weights[name])

    versions = [read()]
    previous: Weights | None = None
    losses, norms = [], []
    for step in range(config.train.steps):
        read_version = step if step < synchronous_steps else max(step - delay, synchronous_steps)
        put(versions[read_version])
        gradient, loss = step_gradient(module, data, step=step, microbatches=config.schedule.microbatches)
        losses.append(loss)
        for name, g in gradient.items():
            g += compensation * g * g * (versions[-1][name] - versions[read_version][name])
        norms.append(clip(gradient, config.train.clip_norm))
        x = versions[-1]
        y = x if previous is None else {name: x[name] + c * previous[name] for name in x}
        put(y)
        for name, p in named.items():
            p.grad = gradient[name]
        for group in optimizer.param_groups:
            factor = learning_rate_factor(config.optimizer, step=step, steps=config.train.steps)
            group["lr"] = group["peak_lr"] * factor
        if step not in skipped:
            optimizer.step()
        after = read()
        update = {name: y[name] - after[name] for name in x}
        if previous is None:
            versions.append({name: x[name] - update[name] for name in x})
        else:
            versions.append({n: x[n] - update[n] - c * (update[n] - previous[n]) for n in x})
        previous = update
    assert previous is not None
    return {name: versions[-1][name] + c * previous[name] for name in previous}, losses, norms


class KeepGradient:
    """In the place of an update: keeps the gradient and leaves the weights as they are."""

    tally = LoadTally([], experts=0, device=torch.device("cpu"))

    def __init__(self, weights: WeightVersions) -> None:
        self._weights = weights
        self.kept: dict[str, Tensor] = {}

    def prepare(self, gradient: GradientBuffer) -> None:
        pass

    def clip(self, gradient: GradientBuffer, *, squared: Tensor) -> None:
        pass

    def at_backward(self, replica: Replica, *, mismatch: int) -> AbstractContextManager[None]:
        return nullcontext()

    def apply(
        self, gradient: GradientBuffer, *, version: int, step: int, clip_by: float | None, finite: bool
    ) -> UpdateResult:
        weights = self._weights
        # With several data ranks the sum of each member is on the one that owns it.
        whole = len(weights.owned) == len(weights.member_names)
        names, views = (
            (weights.names, gradient.views) if whole else (weights.master.names, gradient.owned_views)
        )
        self.kept = {name: view.clone() for name, view in zip(names, views, strict=True)}
        biases = self._weights.newest().biases
        with self._weights.overwriting_oldest(version=version, biases=biases) as replica:
            torch._foreach_copy_(list(replica), list(self._weights.master.parameters))
        return UpdateResult(lr=0.0, grad_norm=None, skipped=False)


def joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same with the rows of the head, perhaps tied to the embedding, together, if it is in shards."""
    rows: dict[int, Tensor] = {}
    whole = {}
    joined_name = "head.weight"
    for name, tensor in tensors.items():
        own_name, held = split_name(name)
        if held is None:
            whole[name] = tensor
        else:
            assert len(held) == len(tensor)
            rows[held.start] = tensor
            joined_name = own_name
    return whole | ({joined_name: torch.cat([rows[start] for start in sorted(rows)])} if rows else {})


def first_gradient(config: RunConfig) -> dict[str, Tensor]:
    """The gradient of the run's first step, gathered by the pipeline and summed over its data ranks."""
    program = segment_program(config, first_step=0, steps=1)
    placed, data_ranks = program.rank_of_stage, config.parallel.data
    ranks = ranks_with(config, connect_in_process(rank_of_stage=placed, data_ranks=data_ranks))
    keepers = []
    for rank in ranks:
        for stage, state in rank.stages.items():
            keeper = KeepGradient(state.weights)
            keepers.append(keeper)
            rank.stages[stage] = replace(state, update=keeper)
    broadcast_initial_weights(ranks, in_process=True)
    drive([rank.executor.run(program) for rank in ranks])
    return {name: gradient for keeper in keepers for name, gradient in keeper.kept.items()}


def check_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Tensors have the same names, and are equal to 1e-10."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-10)


def check_first_gradient(config: RunConfig, expected: Mapping[str, Tensor]) -> None:
    """The pipeline's gradient of the first step is as expected, which is nowhere nothing."""
    for name, tensor in expected.items():
        assert tensor.abs().max() > 1e-6, name
    check_close(joined(first_gradient(config)), expected)


def check_against_one_process(config: RunConfig, **reference: Any) -> Rows:
    """The rows of a replay, whose losses, gradient norms and weights are those of `delayed_training`, to
    1e-10."""
    rows = replayed(config)
    total_microbatches = config.schedule.microbatches * config.parallel.data
    unsharded = replace(config, schedule=replace(config.schedule, microbatches=total_microbatches))
    weights, losses, norms = delayed_training(unsharded, **reference)
    assert rows.result.train_losses == pytest.approx(losses, rel=1e-10)
    if config.train.clip == "global":
        expected_norms = [norm for step, norm in enumerate(norms) if step not in reference.get("skipped", ())]
        reported_norms = [row["grad_norm"] for row in rows.of_kind("step") if not row["skipped"]]
        assert reported_norms == pytest.approx(expected_norms, rel=1e-10)
        assert max(norms) > config.train.clip_norm, "clipping was never active"
    check_close(joined(rows.result.weights), weights)
    tokens = total_microbatches * config.train.microbatch_size * config.data.context
    assert rows.of_kind("start")[0]["tokens_per_step"] == tokens
    return rows
