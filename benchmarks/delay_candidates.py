"""Delayed arms beside synchronous AdamW, each at its best rate, with what the theory of filters says of them.

    python -m benchmarks.delay_candidates SOURCE... [--csv FILE]

A source is an experiment with `optimizer.lr` among its axes (templates/experiments/adamw-under-delay.yaml),
or a file that `--csv` made. An arm is what the other axes but seed and steps say; gaps are over the seeds
that both arms have. Below a table stand the rank correlations of the filters' losses with their measures, at
the rate and seed that most of them have, and with each filter at the best rate of that seed.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl

import asyncpp
from asyncpp_cli.report.analysis.statistics import paired
from asyncpp_cli.report.formats.records import csv_text
from asyncpp_cli.runs.experiment_folder import open_experiment
from benchmarks.best_rates import Best, best, last_losses
from optimizers import check_options
from optimizers.theory.filters import Filter, settling, weight_variance
from optimizers.theory.frontier import Point, point
from stages.config import RunConfig, optimizer_options

_NOT_OF_AN_ARM = ("optimizer.lr", "seed", "train.steps", "model")
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
    filter: Filter | None = field(compare=False)

    @property
    def name(self) -> str:
        return ", ".join(value if key in _NAMED else f"{key} {value}" for key, value in self.settings)

    def is_synchronous(self, optimizer: str) -> bool:
        settings = dict(self.settings)
        return settings["schedule"] == "1f1b" and settings["optimizer"] == optimizer

    @property
    def theory(self) -> Point | None:
        """The filter's measures under a delay of 1; None if the arm is not one of the family's."""
        return None if self.filter is None else point(self.filter, delay=1)


def filter_of(config: RunConfig) -> Filter | None:
    """The momentum of a delayed run, its fixed options included; None if it is not one of the family's."""
    return _filter(
        {"schedule": config.schedule.name, "correction.name": config.correction.name},
        optimizer=config.optimizer.name,
        options=optimizer_options(config.optimizer),
        coefficient=config.error_feedback.coefficient,
    )


def _filter(
    settings: Mapping[str, str], *, optimizer: str, options: Mapping[str, object], coefficient: float
) -> Filter | None:
    corrected = settings.get("correction.name", "none") != "none"
    if settings["schedule"] == "1f1b" or corrected or optimizer not in ("adamw", "qhadamw"):
        return None
    values = check_options(optimizer, options)
    return Filter(float(values["beta1"]), float(values.get("momentum_weight", 1.0)), coefficient)


def arm_of(run: Mapping[str, object], axes: Sequence[str], *, momentum: Filter | None) -> Arm:
    settings = {axis: run[axis] for axis in axes if axis not in _NOT_OF_AN_ARM}
    plain = (None, "none", 0.0)
    return Arm(
        steps=int(str(run["steps"])),
        settings=tuple((key, _text(value)) for key, value in settings.items() if value not in plain),
        filter=momentum,
    )


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def read(sources: Sequence[str]) -> Losses:
    """The losses of the completed runs of experiments and raw numbers.

    Raises:
        ValueError: Two runs of one arm, rate and seed differ in their losses.
    """
    losses: dict[Arm, dict[float, dict[int, float]]] = {}
    for source in sources:
        runs = _of_csv(Path(source)) if source.endswith(".csv") else _of_experiment(source)
        for arm, lr, seed, loss in runs:
            seeds = losses.setdefault(arm, {}).setdefault(lr, {})
            # The same run in two sources has the same bits.
            if seeds.setdefault(seed, loss) != loss:
                raise ValueError(
                    f"{source}: two runs of {arm.name}, {arm.steps} steps, seed {seed} at {lr:g} "
                    "have other losses"
                )
    return losses


def _of_experiment(folder: str) -> Iterator[tuple[Arm, float, int, float]]:
    experiment = asyncpp.open(folder)
    ends = last_losses(experiment)
    status = experiment.status()
    # Axes stand between the run's id and its state.
    axes = status.columns[1 : status.columns.index("state")]
    filters = {run.id: filter_of(run.config()) for run in open_experiment(Path(folder)).runs}
    for run in status.filter(pl.col("state") == "completed").iter_rows(named=True):
        arm = arm_of(run, axes, momentum=filters[run["id"]])
        yield arm, run["optimizer.lr"], run["seed"], ends[run["id"]]


def _of_csv(file: Path) -> Iterator[tuple[Arm, float, int, float]]:
    with file.open(newline="") as stream:
        for row in csv.DictReader(stream):
            steps, lr, seed, loss = (row.pop(name) for name in _OF_A_RUN)
            settings = {key: value for key, value in row.items() if value}
            options = {
                key.removeprefix("optimizer."): float(value)
                for key, value in settings.items()
                if key.startswith("optimizer.")
            }
            momentum = _filter(
                settings,
                optimizer=settings["optimizer"],
                options=options,
                coefficient=float(settings.get("error_feedback", 0)),
            )
            arm = Arm(steps=int(steps), settings=tuple(settings.items()), filter=momentum)
            yield arm, float(lr), int(seed), float(loss)


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


def rows(losses: Losses) -> list[dict[str, object]]:
    """A row for each run; every row has the settings of all arms."""
    keys = _keys(losses)
    return [
        {
            "steps": arm.steps,
            **{key: dict(arm.settings).get(key, "") for key in keys},
            "optimizer.lr": lr,
            "seed": seed,
            "val_loss": loss,
        }
        for arm, rates in sorted(losses.items())
        for lr, of_rate in sorted(rates.items())
        for seed, loss in sorted(of_rate.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("sources", nargs="+", metavar="SOURCE")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    losses = read(options.sources)
    print(page(losses))
    if options.csv is not None:
        of_runs = rows(losses)
        options.csv.write_text(csv_text([list(of_runs[0]), *(list(row.values()) for row in of_runs)]))


if __name__ == "__main__":
    main()
