"""The losses that the law of the gap is fitted to: of experiments, and of the CSV files of earlier ones."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import polars as pl

import asyncpp
from benchmarks.best_rates import last_losses

SYNCHRONOUS = "synchronous"
_FACTORS = ("steps", "parameters", "tokens a step")


@dataclass(frozen=True, kw_only=True, order=True)
class Length:
    """What an arm is compared within: the same model for as many steps with one optimizer."""

    optimizer: str
    parameters: int
    tokens_per_step: int
    steps: int

    @property
    def factors(self) -> Mapping[str, float]:
        return dict(zip(_FACTORS, (self.steps, self.parameters, self.tokens_per_step), strict=True))

    def __str__(self) -> str:
        return f"{self.optimizer} | {self.parameters:,} | {self.tokens_per_step:,} | {self.steps:,}"


Losses = Mapping[Length, Mapping[str, Mapping[float, Mapping[int, float]]]]
"""The last validation loss by length, arm, rate and seed; infinite where it is not a number."""


def read(sources: Sequence[str], *, where: Mapping[str, str]) -> Losses:
    """The losses of the completed runs.

    Args:
        sources: Folders of experiments, and CSV files that `write_csv` made of others.
        where: The value, as text, that a run of an experiment has on an axis. Experiments without the axis
            are read whole.

    Raises:
        ValueError: Two runs are one seed of one arm at one rate: they differ in what no arm tells apart, or
            in their bits. Or the metrics of a completed run are damaged.
    """
    losses: dict[Length, dict[str, dict[float, dict[int, float]]]] = {}
    for source in sources:
        runs = _of_csv(Path(source)) if source.endswith(".csv") else _of_experiment(source, where)
        for length, arm, lr, seed, loss in runs:
            seeds = losses.setdefault(length, {}).setdefault(arm, {}).setdefault(lr, {})
            # The same run in two experiments has the same bits.
            if seeds.setdefault(seed, loss) != loss:
                raise ValueError(
                    f"{source}: two runs of {length.optimizer}, {arm}, {length.steps} steps, seed {seed} at "
                    f"{lr:g} have other losses; choose one of them with --where KEY=VALUE"
                )
    return losses


def _of_experiment(folder: str, where: Mapping[str, str]) -> Iterator[tuple[Length, str, float, int, float]]:
    experiment = asyncpp.open(folder)
    results = experiment.results()
    axes = results.columns[: results.columns.index("status")]
    sizes = results.select(*axes, "parameters", "tokens_per_step")
    ends = last_losses(experiment)
    runs = experiment.status().filter(pl.col("state") == "completed")
    for run in runs.join(sizes, on=axes, nulls_equal=True).iter_rows(named=True):
        if any(axis in run and str(run[axis]) != value for axis, value in where.items()):
            continue
        if run["id"] not in ends:
            raise ValueError(f"{run['id']} has damaged metrics; `asyncpp report {folder}` says what is wrong")
        loss = ends[run["id"]]
        length = Length(**{field.name: run[field.name] for field in fields(Length)})
        yield length, arm_name(run), run["optimizer.lr"], run["seed"], math.inf if math.isnan(loss) else loss


def _of_csv(file: Path) -> Iterator[tuple[Length, str, float, int, float]]:
    for row in pl.read_csv(file).iter_rows(named=True):
        length = Length(**{field.name: row[field.name] for field in fields(Length)})
        yield length, row["arm"], row["lr"], row["seed"], row["val_loss"]


def arm_name(run: Mapping[str, object]) -> str:
    if run["schedule"] in ("1f1b", "gpipe"):
        return SYNCHRONOUS
    coefficient = float(run["error_feedback"] or 0)  # type: ignore[arg-type]
    return f"{run['schedule']}, EF {coefficient:g}" if coefficient else str(run["schedule"])


def write_csv(losses: Losses, file: Path) -> None:
    """One row a run."""
    with file.open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(
            ("optimizer", "parameters", "tokens_per_step", "steps", "arm", "lr", "seed", "val_loss")
        )
        for length, arms in sorted(losses.items()):
            of_length = (length.optimizer, length.parameters, length.tokens_per_step, length.steps)
            for arm, rates in sorted(arms.items()):
                for lr, seeds in sorted(rates.items()):
                    rows.writerows((*of_length, arm, lr, seed, loss) for seed, loss in sorted(seeds.items()))
