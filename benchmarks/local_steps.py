"""Local steps: workers that train copies of a model by themselves and average their weights every few steps.

    python benchmarks/local_steps.py EXPERIMENT --workers 4 --every 8 > losses.csv

Trains each run of an experiment's folder in this way (local SGD, arXiv 1805.09767, with any optimizer). Each
worker has its share of the sequences of a step, which are those that the run itself would read, and an
optimizer of its own, whose state is not averaged; weights are averaged after every `--every` steps and after
the last. The runs must be synchronous, in one micro-batch without a pipeline. Prints a line of CSV for each:
workers, every, and the run's rate, steps, sequences per step, seed and validation loss.
"""

from __future__ import annotations

import argparse
import csv
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from asyncpp_cli.runs.experiment_folder import open_experiment
from optimizers.build import build_optimizer
from schedules import is_synchronous
from stages.config.run_config import RunConfig, optimizer_options
from stages.data.batches import Batches
from stages.data.dataset import prepare
from stages.model.decoder import Stage, initialise
from stages.model.head_loss import next_token_loss
from stages.shape.families import parameter_roles
from stages.shape.parametrization import growth_of
from stages.shape.partition import cut_model
from stages.update.lr_schedule import learning_rate_factor


class Worker:
    """A copy of the model with its own optimizer."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        (cut,) = cut_model(config.model, stages=1, context=config.data.context)
        self.module = Stage(config.model, cut, context=config.data.context)
        self.module.prepare(device=torch.device("cpu"), dtype=torch.float32)
        named = dict(self.module.named_parameters())
        for name, parameter in named.items():
            initialise(parameter, name=name, seed=config.seed, model=config.model)
        roles = parameter_roles(config.model, {name: parameter.ndim for name, parameter in named.items()})
        self._optimizer = build_optimizer(
            named,
            name=config.optimizer.name,
            lr=config.optimizer.lr,
            weight_decay=config.optimizer.weight_decay,
            options=optimizer_options(config.optimizer),
            roles=roles,
            growth=growth_of(config.model),
        )

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def train(self, tokens: Tensor, targets: Tensor, *, step: int) -> None:
        """One step by itself, clipped by the norm of its own gradient."""
        config = self._config
        next_token_loss(self.module(tokens), targets).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, config.train.clip_norm)
        for group in self._optimizer.param_groups:
            factor = learning_rate_factor(config.optimizer, step=step, steps=config.train.steps)
            group["lr"] = group["peak_lr"] * factor
        self._optimizer.step()
        self._optimizer.zero_grad()


@torch.no_grad()
def average(workers: list[Worker]) -> None:
    """Give all workers the mean of their weights."""
    for copies in zip(*(worker.parameters for worker in workers), strict=True):
        mean = torch.stack([copy.detach() for copy in copies]).mean(dim=0)
        for copy in copies:
            copy.copy_(mean)


def trained(config: RunConfig, *, workers: int, every: int) -> float:
    """The validation loss of a run that is trained in local steps, nats per token."""
    torch.set_num_threads(1)
    corpus = prepare(config.data)
    batches = Batches(config, corpus, device=torch.device("cpu"))
    copies = [Worker(config) for _ in range(workers)]
    for step in range(config.train.steps):
        shares = zip(batches.tokens(step).chunk(workers), batches.targets(step).chunk(workers), strict=True)
        for copy, (tokens, targets) in zip(copies, shares, strict=True):
            copy.train(tokens, targets, step=step)
        if (step + 1) % every == 0 or step + 1 == config.train.steps:
            average(copies)
    (count,) = batches.evaluated.values()
    with torch.no_grad():
        losses = [
            next_token_loss(copies[0].module(tokens), targets)
            for tokens, targets in (batches.validation(index, count=count) for index in range(count))
        ]
    return float(torch.stack(losses).mean())


def refusal(config: RunConfig, *, workers: int) -> str | None:
    """Why a run cannot be trained in local steps."""
    parallel, train = config.parallel, config.train
    if not is_synchronous(config.schedule.name) or config.schedule.microbatches > 1:
        return "accepted: a synchronous schedule, with one micro-batch"
    if parallel.stages > 1 or parallel.data > 1 or train.precision != "float32":
        return "accepted: runs of one stage and one data rank in float32"
    if train.microbatch_size % workers:
        return f"train.microbatch_size: {train.microbatch_size} sequences for {workers} workers"
    return None


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("experiment", type=Path)
    arguments.add_argument("--workers", type=int, default=4)
    arguments.add_argument("--every", type=int, default=8, help="steps between two averages")
    arguments.add_argument("--parallel", type=int, default=2, help="runs at a time")
    options = arguments.parse_args()
    configs = [run.config() for run in open_experiment(options.experiment).runs]
    for config in configs:
        if refused := refusal(config, workers=options.workers):
            arguments.error(refused)
    written = csv.writer(sys.stdout, lineterminator="\n")
    written.writerow(["workers", "every", "lr", "steps", "sequences", "seed", "val_loss"])
    with ProcessPoolExecutor(options.parallel) as pool:
        losses = pool.map(partial(trained, workers=options.workers, every=options.every), configs)
        for config, loss in zip(configs, losses, strict=True):
            train = config.train
            run = [config.optimizer.lr, train.steps, train.microbatch_size, config.seed, repr(loss)]
            written.writerow([options.workers, options.every, *run])
            sys.stdout.flush()


if __name__ == "__main__":
    main()
