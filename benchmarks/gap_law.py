"""How the gap to synchronous training falls with steps and size: each arm at its best rate, and a law.

    python -m benchmarks.gap_law EXPERIMENT... [--predict PARAMETERS,STEPS] [--figure FILE.svg]

The experiments have `optimizer.lr` and `train.steps` among their axes (templates/experiments/gap-map.yaml).
An arm is a schedule with or without error feedback, at its best rate (benchmarks/best_rates.py). The law is a
product of powers, fitted to logarithms by least squares; what the experiments do not vary is not in it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

import asyncpp
from asyncpp_cli.report.analysis.statistics import Interval, paired
from asyncpp_cli.report.analysis.t_distribution import t_quantile
from benchmarks.best_rates import best, last_losses

SYNCHRONOUS = "synchronous"


@dataclass(frozen=True, kw_only=True, order=True)
class Length:
    """What an arm is compared within: the same model for as many steps with one optimizer."""

    optimizer: str
    parameters: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The loss of an arm minus that of the synchronous arm, each at its best rate."""

    length: Length
    arm: str
    lr: float
    differences: Sequence[float]
    """By common seed."""
    on_edge: bool

    @property
    def mean(self) -> float:
        return float(np.mean(self.differences))

    @property
    def interval(self) -> Interval | None:
        return paired(self.differences)


@dataclass(frozen=True, kw_only=True)
class Law:
    """`gap = exp(constant) * product(factor ** power)`."""

    names: Sequence[str]
    """Of the factors; the constant comes first in the arrays."""
    powers: np.ndarray
    covariance: np.ndarray
    residuals: np.ndarray
    """Of the logarithms."""

    @property
    def freedom(self) -> int:
        return len(self.residuals) - len(self.powers)

    def interval(self, index: int) -> float:
        """Half of the 95 % interval of a power."""
        return t_quantile(0.975, self.freedom) * math.sqrt(self.covariance[index, index])

    def predict(self, factors: Mapping[str, float]) -> tuple[float, float, float]:
        """The gap, and the bounds of the 95 % prediction interval of one more gap."""
        row = np.array([1.0, *(math.log(factors[name]) for name in self.names)])
        middle = float(row @ self.powers)
        noise = float(self.residuals @ self.residuals) / self.freedom
        reach = t_quantile(0.975, self.freedom) * math.sqrt(float(row @ self.covariance @ row) + noise)
        return math.exp(middle), math.exp(middle - reach), math.exp(middle + reach)


def fit(gaps: Sequence[float], factors: Mapping[str, Sequence[float]]) -> Law | None:
    """The law of positive gaps; None with too few of them. Factors that do not vary are left out."""
    names = [name for name, values in factors.items() if len(set(values)) > 1]
    rows = np.array([[1.0, *(math.log(factors[name][i]) for name in names)] for i in range(len(gaps))])
    if len(gaps) <= len(names) + 1 or np.linalg.matrix_rank(rows) < len(names) + 1:
        return None
    logs = np.log(np.array(gaps))
    powers, *_ = np.linalg.lstsq(rows, logs, rcond=None)
    residuals = logs - rows @ powers
    noise = float(residuals @ residuals) / (len(gaps) - len(powers))
    return Law(
        names=names, powers=powers, covariance=noise * np.linalg.inv(rows.T @ rows), residuals=residuals
    )


def read(folders: Sequence[str]) -> dict[Length, dict[str, dict[float, dict[int, float]]]]:
    """The last validation loss of every completed run: by length, arm, rate and seed."""
    losses: dict[Length, dict[str, dict[float, dict[int, float]]]] = {}
    for folder in folders:
        experiment = asyncpp.open(folder)
        parameters = dict(experiment.results()["model", "parameters"].drop_nulls().iter_rows())
        ends = last_losses(experiment)
        for run in experiment.status().filter(pl.col("state") == "completed").iter_rows(named=True):
            length = Length(
                optimizer=run["optimizer"], parameters=parameters[run["model"]], steps=run["steps"]
            )
            arms = losses.setdefault(length, {})
            rates = arms.setdefault(arm_name(run), {})
            rates.setdefault(run["optimizer.lr"], {})[run["seed"]] = ends[run["id"]]
    return losses


def arm_name(run: Mapping[str, object]) -> str:
    if run["schedule"] in ("1f1b", "gpipe"):
        return SYNCHRONOUS
    coefficient = float(run["error_feedback"] or 0)  # type: ignore[arg-type]
    return f"{run['schedule']}, EF {coefficient:g}" if coefficient else str(run["schedule"])


def gaps_of(losses: Mapping[Length, Mapping[str, Mapping[float, Mapping[int, float]]]]) -> list[Gap]:
    """Each arm at its best rate beside the synchronous one at its own."""
    found = []
    for length, arms in sorted(losses.items()):
        if SYNCHRONOUS not in arms:
            continue
        baseline = best(arms[SYNCHRONOUS])
        for arm, rates in sorted(arms.items()):
            chosen = best(rates)
            seeds = sorted(set(chosen.losses) & set(baseline.losses))
            if arm == SYNCHRONOUS or not seeds:
                continue
            differences = [chosen.losses[seed] - baseline.losses[seed] for seed in seeds]
            edge = chosen.on_edge or baseline.on_edge
            found.append(Gap(length=length, arm=arm, lr=chosen.lr, differences=differences, on_edge=edge))
    return found


def page(
    losses: Mapping[Length, Mapping[str, Mapping[float, Mapping[int, float]]]],
    targets: Sequence[tuple[int, int]],
) -> str:
    lines = ["# How the gap falls", "", "## Loss by rate", ""]
    lines += ["| optimizer | parameters | steps | arm | best rate | loss | seeds | mean loss by rate |"]
    lines += ["| --- | ---: | ---: | --- | ---: | ---: | ---: | --- |"]
    for length, arms in sorted(losses.items()):
        for arm, rates in sorted(arms.items()):
            chosen = best(rates)
            values = list(chosen.losses.values())
            spread = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
            edge = " (edge)" if chosen.on_edge else ""
            tried = ", ".join(f"{lr:g}: {loss:.3f}" for lr, loss in chosen.tried.items())
            lines.append(
                f"| {length.optimizer} | {length.parameters:,} | {length.steps:,} | {arm} "
                f"| {chosen.lr:g}{edge} | {np.mean(values):.4f}{spread} | {len(values)} | {tried} |"
            )
    gaps = gaps_of(losses)
    lines += ["", "## Gap, each arm at its best rate", ""]
    lines += ["| optimizer | parameters | steps | arm | gap | 95 % interval, paired | seeds |"]
    lines += ["| --- | ---: | ---: | --- | ---: | ---: | ---: |"]
    for gap in gaps:
        interval = gap.interval
        between = "-" if interval is None else f"{interval.low:+.4f} to {interval.high:+.4f}"
        lines.append(
            f"| {gap.length.optimizer} | {gap.length.parameters:,} | {gap.length.steps:,} | {gap.arm} "
            f"| {gap.mean:+.4f} | {between} | {len(gap.differences)} |"
        )
    return "\n".join([*lines, "", *_law_lines(gaps, targets)])


def _law_lines(gaps: Sequence[Gap], targets: Sequence[tuple[int, int]]) -> list[str]:
    lines = ["## The law", ""]
    for (optimizer, arm), group in _grouped(gaps).items():
        positive = [gap for gap in group if gap.mean > 0]
        law = fit(
            [gap.mean for gap in positive],
            {
                "steps": [gap.length.steps for gap in positive],
                "parameters": [gap.length.parameters for gap in positive],
            },
        )
        if law is None:
            lines.append(f"- {optimizer}, {arm}: {len(positive)} positive gaps are too few for a fit.")
            continue
        powers = " ".join(
            f"{name}^({law.powers[i]:.2f} ± {law.interval(i):.2f})" for i, name in enumerate(law.names, 1)
        )
        off = ", ".join(f"{100 * math.expm1(value):+.0f} %" for value in law.residuals)
        lines.append(f"- {optimizer}, {arm}: gap = {math.exp(law.powers[0]):.3g} {powers}; residuals {off}.")
        for parameters, steps in targets:
            middle, low, high = law.predict({"steps": steps, "parameters": parameters})
            rest = "." if "parameters" in law.names else ", if the size does not matter."
            lines.append(
                f"  At {parameters:,} parameters and {steps:,} steps: {middle:+.4f} "
                f"(95 %: {low:+.4f} to {high:+.4f}){rest}"
            )
    return lines


def _grouped(gaps: Sequence[Gap]) -> dict[tuple[str, str], list[Gap]]:
    groups: dict[tuple[str, str], list[Gap]] = defaultdict(list)
    for gap in gaps:
        groups[gap.length.optimizer, gap.arm].append(gap)
    return groups


def draw(gaps: Sequence[Gap], file: Path) -> None:
    """Gap over steps, a line for each optimizer, arm and size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    axes = figure.subplots()
    for (optimizer, arm), group in _grouped(gaps).items():
        for parameters in sorted({gap.length.parameters for gap in group}):
            line = [gap for gap in group if gap.length.parameters == parameters and gap.mean > 0]
            reach = [
                0.0 if (i := gap.interval) is None else min(i.half_width, gap.mean * 0.99) for gap in line
            ]
            axes.errorbar(
                [gap.length.steps for gap in line],
                [gap.mean for gap in line],
                yerr=reach,
                marker="o",
                capsize=3,
                label=f"{optimizer}, {arm}, {parameters:,}",
            )
    axes.set(xscale="log", yscale="log", xlabel="steps", ylabel="gap in validation loss (nats per token)")
    axes.legend(fontsize=7)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("experiments", nargs="+")
    parser.add_argument("--predict", action="append", default=[], metavar="PARAMETERS,STEPS")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    targets = [(int(n), int(steps)) for n, steps in (text.split(",") for text in options.predict)]
    losses = read(options.experiments)
    text = page(losses, targets)
    sys.stdout.write(text + "\n")
    if options.figure is not None:
        draw(gaps_of(losses), options.figure)


if __name__ == "__main__":
    main()
