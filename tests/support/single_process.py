"""Reference training: the whole model in one process, with plain autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from optimizers.build import build_optimizer
from stages.config.run_config import RunConfig, optimizer_options
from stages.data.batches import Batches
from stages.data.dataset import prepare
from stages.model.decoder import Stage, initialise
from stages.model.head_loss import next_token_loss
from stages.shape.families import parameter_roles
from stages.shape.parametrization import growth_of
from stages.shape.partition import cut_model
from stages.update.lr_schedule import learning_rate_factor

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
