"""Runs compared seed by seed: runs of one seed start from the same weights and see the same data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from asyncpp_cli.report.loaded import Run
from asyncpp_cli.report.statistics import Interval, paired, spread, welch


def losses_by_seed(runs: Sequence[Run]) -> dict[Any, float]:
    """The last validation loss of each seed that is known; of several runs with one seed, their mean."""
    losses: dict[Any, list[float]] = {}
    for run in runs:
        seed, loss = run.value("seed"), run.measurement.val_loss
        if seed is not None and loss is not None:
            losses.setdefault(seed, []).append(loss)
    return {seed: fmean(of_seed) for seed, of_seed in losses.items()}


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The losses of two arms, by the seeds that both of them have."""

    mine: Mapping[Any, float]
    theirs: Mapping[Any, float]
    unpaired: tuple[Any, ...]
    """Seeds that only one of them has, in order: no part of the comparison."""

    @property
    def seeds(self) -> list[Any]:
        return list(self.mine)

    @property
    def differences(self) -> list[float]:
        """This arm's loss minus the other's, seed by seed."""
        return [loss - self.theirs[seed] for seed, loss in self.mine.items()]

    @property
    def mean(self) -> float | None:
        """Of the differences; None without a seed in common."""
        return fmean(self.differences) if self.mine else None

    @property
    def interval(self) -> Interval | None:
        """Of the mean difference; None for fewer than two seeds."""
        return paired(self.differences)

    @property
    def interval_welch(self) -> Interval | None:
        """The same from the two means, the runs taken for independent: usually far wider."""
        mine, theirs = spread(self.mine.values()), spread(self.theirs.values())
        return welch(mine, theirs) if mine is not None and theirs is not None else None


def pairs(mine: Mapping[Any, float], theirs: Mapping[Any, float]) -> Pairs:
    """The two arms' losses, seed by seed, in the order of the seeds."""
    both = sorted(mine.keys() & theirs.keys(), key=_order)
    return Pairs(
        mine={seed: mine[seed] for seed in both},
        theirs={seed: theirs[seed] for seed in both},
        unpaired=tuple(sorted(mine.keys() ^ theirs.keys(), key=_order)),
    )


def _order(seed: Any) -> tuple[bool, float, str]:
    return (not isinstance(seed, int), seed if isinstance(seed, int) else 0, str(seed))
