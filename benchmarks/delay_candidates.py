"""Delayed arms beside synchronous AdamW, each at its best rate, with what the theory of filters says of them.

    python -m benchmarks.delay_candidates EXPERIMENT...

The experiments have `optimizer.lr` among their axes (templates/experiments/adamw-under-delay.yaml). An arm is
what the other axes but seed and steps say; gaps are over the seeds that both arms have.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

import asyncpp
from asyncpp_cli.report.analysis.statistics import paired
from benchmarks.best_rates import Best, best, last_losses
from optimizers import check_options
from optimizers.theory.filters import Filter
from optimizers.theory.frontier import Point, point

_NOT_OF_AN_ARM = ("optimizer.lr", "seed", "train.steps", "model")


@dataclass(frozen=True, kw_only=True, order=True)
class Arm:
    """A way to train, but for rate and seed: values of axes by key, as text, without null, `none` and 0."""

    steps: int
    settings: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        named = ("schedule", "optimizer")
        return ", ".join(value if key in named else f"{key} {value}" for key, value in self.settings)

    @property
    def is_baseline(self) -> bool:
        settings = dict(self.settings)
        return settings["schedule"] == "1f1b" and settings["optimizer"] == "adamw"

    @property
    def theory(self) -> Point | None:
        """The filter's measures under a delay of 1; None if the arm is not one of the family's."""
        settings = dict(self.settings)
        name = settings["optimizer"]
        if (
            settings["schedule"] == "1f1b"
            or "correction.name" in settings
            or name not in ("adamw", "qhadamw")
        ):
            return None
        options = {
            key: float(settings[f"optimizer.{key}"])
            for key in ("beta1", "momentum_weight")
            if f"optimizer.{key}" in settings
        }
        complete = check_options(name, options)
        weight = float(complete.get("momentum_weight", 1.0))
        coefficient = float(settings.get("error_feedback", 0))
        return point(Filter(float(complete["beta1"]), weight, coefficient), delay=1)


def arm_of(run: Mapping[str, object], axes: Sequence[str]) -> Arm:
    settings = {axis: run[axis] for axis in axes if axis not in _NOT_OF_AN_ARM}
    plain = (None, "none", 0.0)
    return Arm(
        steps=int(str(run["steps"])),
        settings=tuple((key, _text(value)) for key, value in settings.items() if value not in plain),
    )


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def read(folders: Sequence[str]) -> dict[Arm, dict[float, dict[int, float]]]:
    """The last validation loss of every completed run: by arm, rate and seed."""
    losses: dict[Arm, dict[float, dict[int, float]]] = {}
    for folder in folders:
        experiment = asyncpp.open(folder)
        ends = last_losses(experiment)
        status = experiment.status()
        # Axes stand between the run's id and its state.
        axes = status.columns[1 : status.columns.index("state")]
        for run in status.filter(pl.col("state") == "completed").iter_rows(named=True):
            rates = losses.setdefault(arm_of(run, axes), {}).setdefault(run["optimizer.lr"], {})
            rates[run["seed"]] = ends[run["id"]]
    return losses


def page(losses: Mapping[Arm, Mapping[float, Mapping[int, float]]]) -> str:
    """A table for each length, by increasing loss."""
    lines = []
    for steps in sorted({arm.steps for arm in losses}):
        arms = {arm: best(rates) for arm, rates in losses.items() if arm.steps == steps}
        baselines = [found for arm, found in arms.items() if arm.is_baseline]
        lines += [f"## {steps:,} steps", ""]
        lines += [
            "| arm | best rate | loss | gap | 95 %, paired | seeds | limit | noise | lag | loss by rate |"
        ]
        lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"]
        for arm, chosen in sorted(arms.items(), key=lambda item: np.mean(list(item[1].losses.values()))):
            lines.append(_line(arm, chosen, baselines[0] if baselines else None))
        lines.append("")
    return "\n".join(lines)


def _line(arm: Arm, chosen: Best, baseline: Best | None) -> str:
    seeds = sorted(set(chosen.losses) & set(baseline.losses)) if baseline else []
    differences = [chosen.losses[seed] - baseline.losses[seed] for seed in seeds] if baseline else []
    interval = paired(differences)
    between = "-" if interval is None else f"{interval.low:+.4f} to {interval.high:+.4f}"
    gap = f"{np.mean(differences):+.4f}" if differences else "-"
    theory = arm.theory
    numbers = "- | - | -" if theory is None else f"{theory.limit:.3g} | {theory.noise:.3g} | {theory.lag:.3g}"
    edge = " (edge)" if chosen.on_edge else ""
    tried = ", ".join(f"{lr:g}: {loss:.3f}" for lr, loss in chosen.tried.items())
    loss = np.mean(list(chosen.losses.values()))
    return (
        f"| {arm.name} | {chosen.lr:g}{edge} | {loss:.4f} | {gap} | {between} "
        f"| {len(seeds) or len(chosen.losses)} | {numbers} | {tried} |"
    )


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m benchmarks.delay_candidates EXPERIMENT...")
    print(page(read(sys.argv[1:])))
