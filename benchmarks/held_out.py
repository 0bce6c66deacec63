"""Losses of runs by block of the validation text, and differences with the error of the evaluation in them.

    python -m benchmarks.held_out EXPERIMENT... --csv FILE [--step N] [--blocks K] [--tokens T]

Each completed run (with --step: each that has that checkpoint) is one row: its settings, the loss that it
measured itself at that step, and the loss of the saved evaluation weights on each of K equal parts of
T validation tokens, the same for all runs. With --blocks 0 only its own loss, as for the choice of a
rate.

An arm's seeds share the validation text, so their spread says nothing of the text's chance. The blocks do: a
difference of two arms has a variance over seeds and one over blocks.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any

from asyncpp_cli.report.analysis.statistics import t_quantile

if TYPE_CHECKING:
    from asyncpp_cli.runs.run_folder import Run
    from stages.config.run_config import RunConfig

TOKENS = 2**19
"""Validation tokens that all blocks have together, unless --tokens says otherwise."""
BLOCKS = 16
_SEQUENCES = 64

Losses = Mapping[int, Sequence[float]]
"""Loss by block, of each seed of an arm."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Mean difference of two arms, nats per token, with standard errors and an interval."""

    mean: float
    of_seeds: float
    of_evaluation: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ({self.low:+.4f} to {self.high:+.4f})"

    def verdict(self, *, bound: float) -> str:
        """What may be said of it: one arm is lower, both are equal within `bound`, or neither."""
        if -bound < self.low and self.high < bound:
            return "equal"
        if self.low > 0:
            return "higher"
        return "lower" if self.high < 0 else "undecided"


def difference(first: Losses, second: Losses, *, comparisons: int) -> Difference:
    """The first arm's losses minus the second's, paired by seed and block.

    The interval holds for all of `comparisons` together with 95 % (Bonferroni). Its variance is the sum of
    those over seeds and over blocks; degrees of freedom by Satterthwaite (Biometrics Bulletin 2, 1946).

    Raises:
        ValueError: fewer than two common seeds.
    """
    seeds = sorted(first.keys() & second.keys())
    if len(seeds) < 2:
        raise ValueError(f"{len(seeds)} common seeds")
    table = [[a - b for a, b in zip(first[seed], second[seed], strict=True)] for seed in seeds]
    blocks = len(table[0])
    by_seed = [fmean(row) for row in table]
    by_block = [fmean(row[block] for row in table) for block in range(blocks)]
    seed_part, block_part = variance(by_seed) / len(seeds), variance(by_block) / blocks
    return _around(
        fmean(by_seed),
        (seed_part, len(seeds) - 1),
        (block_part, blocks - 1),
        comparisons=comparisons,
        seeds=len(seeds),
    )


def _around(
    mean: float, seeds_part: tuple[float, int], block_part: tuple[float, int], *, comparisons: int, seeds: int
) -> Difference:
    parts = (seeds_part, block_part)
    total = sum(part for part, _ in parts)
    reach = 0.0
    if total > 0:
        freedom = total**2 / sum(part**2 / degrees for part, degrees in parts)
        reach = t_quantile(1 - 0.025 / comparisons, freedom) * total**0.5
    return Difference(
        mean=mean,
        of_seeds=seeds_part[0] ** 0.5,
        of_evaluation=block_part[0] ** 0.5,
        low=mean - reach,
        high=mean + reach,
        seeds=seeds,
    )


def blocks_of(row: Mapping[str, str]) -> list[float]:
    """A row's loss by block."""
    return [float(value) for key, value in row.items() if key.startswith("block_")]


def rows_of(
    folder: str, *, step: int | None = None, blocks: int = BLOCKS, tokens: int = TOKENS
) -> Iterator[dict[str, Any]]:
    """One row for each run that has ended, or has a checkpoint of `step`."""
    import torch

    import asyncpp
    from asyncpp_cli.experiment.run_data import config_to_train
    from asyncpp_cli.runs.experiment_folder import open_experiment

    torch.set_num_threads(1)
    steps = asyncpp.open(folder).steps()
    measured = {
        (run, at): loss for run, at, loss in steps.select("run", "step", "val_loss").iter_rows() if loss
    }
    for run in open_experiment(Path(folder)).runs:
        config = config_to_train(run)
        at = step or config.train.steps
        if (run.id, at) not in measured:
            continue
        row = {
            "schedule": config.schedule.name,
            "delay": config.schedule.delay if config.schedule.name.startswith("2bw") else 0,
            "stages": config.parallel.stages,
            "microbatches": config.schedule.microbatches,
            "optimizer": config.optimizer.name,
            "beta1": config.optimizer.beta1,
            "momentum": config.optimizer.momentum,
            "error_feedback": config.error_feedback.coefficient,
            "correction": config.correction.name,
            "lr": config.optimizer.lr,
            "steps": config.train.steps,
            "step": at,
            "seed": config.seed,
            "val_loss": measured[run.id, at],
        }
        if blocks:
            losses = _losses(run, config, at, blocks=blocks, tokens=tokens)
            row |= {f"block_{block:02}": round(loss, 6) for block, loss in enumerate(losses)}
        yield row


def _losses(run: Run, config: RunConfig, step: int, *, blocks: int, tokens: int) -> list[float]:
    import torch

    from asyncpp_cli.experiment.run_data import owners_of
    from stages.checkpoint.sample import whole_model
    from stages.checkpoint.saved_weights import newest_weights
    from stages.data.batches import Batches
    from stages.data.dataset import find_corpus

    saved = newest_weights(run.checkpoints, config, step=step, owners=owners_of(run))
    module, _ = whole_model(saved, config)
    with torch.no_grad():
        config.train.microbatch_size = _SEQUENCES
        batches = Batches(config, find_corpus(config.data), device=torch.device("cpu"))
        count = tokens // (_SEQUENCES * config.data.context)
        losses = []
        for index in range(count):
            given, targets = batches.validation(index, count=count)
            losses.append(float(module(given, None, targets=targets)))
    of_block = count // blocks
    return [fmean(losses[block * of_block : (block + 1) * of_block]) for block in range(blocks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiments", nargs="+")
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--step", type=int, help="of the checkpoint; default: the last of each run")
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of all blocks; default: {TOKENS:,}")
    given = parser.parse_args()
    rows = [
        row
        for folder in given.experiments
        for row in rows_of(folder, step=given.step, blocks=given.blocks, tokens=given.tokens)
    ]
    with given.csv.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
