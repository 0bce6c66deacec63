"""Delayed arms and synchronous AdamW, each at its best rate, with what the theory of filters says of them.

    python -m benchmarks.results.delayed_adamw

Prints the tables of delayed-adamw-2026-11-22.md from its CSV file. An arm is what the axes but rate, seed
and steps say; gaps are over the seeds that both arms have. Below a table stand the rank correlations of the
filters' losses with their measures, at the rate and seed that most of them have, and with each filter at the
best rate of that seed.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from asyncpp_cli.report.analysis.statistics import paired
from benchmarks.results.best_rates import Best, best
from benchmarks.results.momentum_filters import Filter, Point, point, settling, weight_variance
from optimizers import check_options

RAW = Path(__file__).with_name("delayed-adamw-2026-11-22.csv")
_OF_A_RUN = ("steps", "optimizer.lr", "seed", "val_loss")
_NAMED = ("schedule", "optimizer")
"""What an arm is called by in a table; its other settings have columns."""
_COLUMNS = (
    *("best rate", "loss", "gap", "95 %, paired", "seeds"),
    *("limit", "noise", "lag", "settling", "variance", "loss by rate"),
)
_SEVERAL = 3
"""Seeds below which a gap says little: those arms have a table of their own."""

Losses = Mapping["Arm", Mapping[float, Mapping[int, float]]]
"""The last validation loss by arm, rate and seed."""


@dataclass(frozen=True, kw_only=True, order=True)
class Arm:
    """A way to train, but for rate and seed: values of axes by key, as text, without null, `none` and 0."""

    steps: int
    settings: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return ", ".join(value if key in _NAMED else f"{key} {value}" for key, value in self.settings)

    def is_synchronous(self, optimizer: str) -> bool:
        settings = dict(self.settings)
        return settings["schedule"] == "1f1b" and settings["optimizer"] == optimizer

    @property
    def theory(self) -> Point | None:
        """The filter's measures under a delay of 1; None if the arm is not one of the family's."""
        momentum = _filter(dict(self.settings))
        return None if momentum is None else point(momentum, delay=1)


def _filter(settings: Mapping[str, str]) -> Filter | None:
    """The momentum of a delayed arm; None if it is not one of the family's."""
    corrected = settings.get("correction.name", "none") != "none"
    optimizer = settings["optimizer"]
    if settings["schedule"] == "1f1b" or corrected or optimizer not in ("adamw", "qhadamw"):
        return None
    given = {key: float(value) for key, value in settings.items() if key.startswith("optimizer.")}
    options = check_options(optimizer, {key.removeprefix("optimizer."): given[key] for key in given})
    coefficient = float(settings.get("error_feedback", 0))
    return Filter(float(options["beta1"]), float(options.get("momentum_weight", 1.0)), coefficient)


def read(file: Path = RAW) -> Losses:
    """The losses of the runs of a CSV file."""
    losses: dict[Arm, dict[float, dict[int, float]]] = {}
    with file.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            steps, lr, seed, loss = (row.pop(name) for name in _OF_A_RUN)
            settings = {key: value for key, value in row.items() if value}
            arm = Arm(steps=int(steps), settings=tuple(settings.items()))
            losses.setdefault(arm, {}).setdefault(float(lr), {})[int(seed)] = float(loss)
    return losses


def page(losses: Losses) -> str:
    """A table for each length, by increasing gap, and one of the arms with few seeds."""
    lines = []
    for steps in sorted({arm.steps for arm in losses}):
        arms = {arm: best(rates) for arm, rates in losses.items() if arm.steps == steps}
        # Of several, the best of those with the most seeds.
        baselines = sorted(
            (found for arm, found in arms.items() if arm.is_synchronous("adamw")),
            key=lambda found: (-len(found.losses), float(np.mean(list(found.losses.values())))),
        )
        baseline = baselines[0] if baselines else None
        gaps = {arm: _differences(chosen, baseline) for arm, chosen in arms.items()}
        # Without a baseline each difference is the loss.
        order = sorted(arms, key=lambda arm: float(np.mean(gaps[arm] or [np.inf])))
        rows = {arm: _row(arm, arms[arm], gaps[arm] if baseline else []) for arm in order}
        several = [arm for arm in order if len(arms[arm].losses) >= _SEVERAL]
        few = [arm for arm in order if arm not in several]
        lines += [f"## {steps:,} steps", "", *_table(several or few, rows)]
        if several and few:
            lines += [f"With fewer than {_SEVERAL} seeds:", "", *_table(few, rows)]
        lines += _correlations({arm: losses[arm] for arm in arms})
    return "\n".join(lines)


def _table(arms: Sequence[Arm], rows: Mapping[Arm, str]) -> list[str]:
    keys = [key for key in _keys(arms) if key not in _NAMED]
    names = ["arm", *(key.removeprefix("optimizer.") for key in keys), *_COLUMNS]
    lines = [f"| {' | '.join(names)} |", f"| --- |{' ---: |' * (len(names) - 2)} --- |"]
    for arm in arms:
        settings = dict(arm.settings)
        name = ", ".join(settings[key] for key in _NAMED if key in settings)
        lines.append(f"| {' | '.join((name, *(settings.get(key, '') for key in keys)))} | {rows[arm]} |")
    return [*lines, ""]


def _keys(arms: Iterable[Arm]) -> list[str]:
    return list(dict.fromkeys(key for arm in arms for key, _ in arm.settings))


def _differences(chosen: Best, baseline: Best | None) -> list[float]:
    """By the seeds that both have."""
    of_baseline = dict.fromkeys(chosen.losses, 0.0) if baseline is None else baseline.losses
    return [chosen.losses[seed] - of_baseline[seed] for seed in sorted(set(chosen.losses) & set(of_baseline))]


def _row(arm: Arm, chosen: Best, differences: Sequence[float]) -> str:
    """The cells under `_COLUMNS`."""
    interval = paired(differences)
    between = "-" if interval is None else f"{interval.low:+.4f} to {interval.high:+.4f}"
    gap = f"{np.mean(differences):+.4f}" if differences else "-"
    theory = arm.theory
    numbers = "- | - | - | - | -" if theory is None else _shown(theory)
    edge = " (edge)" if chosen.on_edge else ""
    tried = ", ".join(f"{lr:g}: {loss:.3f}" for lr, loss in chosen.tried.items())
    loss = np.mean(list(chosen.losses.values()))
    return (
        f"{chosen.lr:g}{edge} | {loss:.4f} | {gap} | {between} "
        f"| {len(differences) or len(chosen.losses)} | {numbers} | {tried}"
    )


def _measures(theory: Point) -> dict[str, float]:
    """Settling and variance at the steps that `asyncpp theory frontier` has by default."""
    return {
        "limit": theory.limit,
        "noise": theory.noise,
        "lag": theory.lag,
        "settling": settling(theory.filter, delay=1, step=0.01),
        "variance": weight_variance(theory.filter, delay=1, step=0.5),
    }


def _shown(theory: Point) -> str:
    formats = {"settling": ".0f", "variance": ".2f"}
    return " | ".join(f"{value:{formats.get(name, '.3g')}}" for name, value in _measures(theory).items())


def _correlations(losses: Losses) -> list[str]:
    """Spearman's, over the arms that are filters: at equal rates, and each at the best rate of that seed."""
    filters = {arm: theory for arm in losses if (theory := arm.theory) is not None}
    settings = Counter((lr, seed) for arm in filters for lr, seeds in losses[arm].items() for seed in seeds)
    if not settings:
        return []
    (lr, seed), count = settings.most_common(1)[0]
    if count < 3:
        return []
    of_seed = {arm: {rate: of[seed] for rate, of in losses[arm].items() if seed in of} for arm in filters}
    equal = {arm: rates[lr] for arm, rates in of_seed.items() if lr in rates}
    lowest = {arm: min(rates.values()) for arm, rates in of_seed.items() if rates}
    return [
        f"Rank correlation with the loss, {len(of)} filters {where}, seed {seed}: {_ranks(of, filters)}.\n"
        for of, where in ((equal, f"at a rate of {lr:g}"), (lowest, "each at its best rate"))
    ]


def _ranks(losses: Mapping[Arm, float], filters: Mapping[Arm, Point]) -> str:
    frame = pl.DataFrame([{"loss": loss, **_measures(filters[arm])} for arm, loss in losses.items()])
    names = frame.columns[1:]
    found = frame.select(pl.corr("loss", name, method="spearman").alias(name) for name in names).row(0)
    return ", ".join(f"{name} {value:+.2f}" for name, value in zip(names, found, strict=True))


if __name__ == "__main__":
    print(page(read()))
