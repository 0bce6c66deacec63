"""Differences of losses measured by block of the validation text, with the error of the evaluation in them.

An arm's seeds share the validation text, so their spread says nothing of the text's chance. The blocks do: a
difference of two arms has a variance over seeds and one over blocks. The program that measured the losses of
a run by block, benchmarks/held_out.py, is in commit 6a1d8e3.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance

from asyncpp_cli.report.analysis.statistics import t_quantile

Row = Mapping[str, str]


def rows_of(name: str) -> list[Row]:
    """The rows of a raw file beside the pages."""
    with Path(__file__).with_name(f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


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
