"""How the gap to synchronous training falls with steps, batch and size, and grows with the rate: two laws.

    python -m benchmarks.results.gap_map

Prints the tables of gap-map-2026-11-23.md from its CSV file. An arm is a schedule with or without error
feedback. One law is of the gaps with each arm at its best rate, the other of those at equal rates. Each is
a product of powers; what the runs do not vary is not in it. A gap is also given in steps: how many times as
many as the synchronous arm needs for the same loss. Between the lengths of synchronous runs, each with a
learning rate that falls to its own end, the loss is taken as linear in the logarithm of the steps.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from asyncpp_cli.report.analysis.statistics import Interval, paired, t_quantile
from benchmarks.results.best_rates import best

RAW = Path(__file__).with_name("gap-map-2026-11-23.csv")
SYNCHRONOUS = "synchronous"
_FACTORS = ("steps", "parameters", "tokens a step")
_HEAD, _RULE = "optimizer | parameters | tokens a step | steps", "--- | ---: | ---: | ---:"
_ITERATIONS = 1000
_ENOUGH = 1e-12
"""A relative fall of the sum of squares that ends the search."""


@dataclass(frozen=True, order=True)
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


def read(file: Path = RAW) -> Losses:
    """The losses of the runs of a CSV file."""
    losses: dict[Length, dict[str, dict[float, dict[int, float]]]] = {}
    with file.open(newline="", encoding="utf-8") as rows:
        for row in csv.DictReader(rows):
            size = Length(row["optimizer"], *(int(row[field.name]) for field in fields(Length)[1:]))
            of_rate = losses.setdefault(size, {}).setdefault(row["arm"], {}).setdefault(float(row["lr"]), {})
            of_rate[int(row["seed"])] = float(row["val_loss"])
    return losses


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """`value = exp(constant) * product(factor ** power)`, plus an error that is as large for all values."""

    names: Sequence[str]
    """Of the factors; the constant comes first in the arrays."""
    powers: np.ndarray
    covariance: np.ndarray
    residuals: np.ndarray
    """Values minus those of the law."""

    @property
    def freedom(self) -> int:
        return len(self.residuals) - len(self.powers)

    def interval(self, index: int) -> float:
        """Half of the 95 % interval of a power."""
        return t_quantile(0.975, self.freedom) * math.sqrt(self.covariance[index, index])

    def predict(self, factors: Mapping[str, float]) -> tuple[float, float, float]:
        """The law's value, and the bounds of its 95 % interval."""
        row = np.array([1.0, *(math.log(factors[name]) for name in self.names)])
        middle = float(row @ self.powers)
        reach = t_quantile(0.975, self.freedom) * math.sqrt(float(row @ self.covariance @ row))
        return math.exp(middle), math.exp(middle - reach), math.exp(middle + reach)


def fit(values: Sequence[float], factors: Mapping[str, Sequence[float]]) -> PowerLaw | None:
    """The law of values, which may be below zero by their error.

    Args:
        values: What the law is of.
        factors: By name, one number above zero for each value. Those that do not vary are left out.

    Returns:
        None with too few values, or too few above zero to begin with.
    """
    names = [name for name, column in factors.items() if len(set(column)) > 1]
    rows = np.array([[1.0, *(math.log(factors[name][i]) for name in names)] for i in range(len(values))])
    measured = np.array(values)
    above = measured > 0
    enough = len(values) > len(names) + 1 and np.any(above)
    if not enough or np.linalg.matrix_rank(rows[above]) < len(names) + 1:
        return None
    # The law of the logarithms is near enough to begin with.
    start, *_ = np.linalg.lstsq(rows[above], np.log(measured[above]), rcond=None)
    powers = _descend(start, rows, measured)
    residuals = measured - np.exp(rows @ powers)
    slopes = np.exp(rows @ powers)[:, None] * rows
    noise = float(residuals @ residuals) / (len(values) - len(powers))
    return PowerLaw(
        names=names, powers=powers, covariance=noise * np.linalg.inv(slopes.T @ slopes), residuals=residuals
    )


def _descend(powers: np.ndarray, rows: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """The least sum of squares of `measured - exp(rows @ powers)`, by Levenberg's and Marquardt's steps."""
    damping = 1e-3
    off = measured - np.exp(rows @ powers)
    for _ in range(_ITERATIONS):
        slopes = np.exp(rows @ powers)[:, None] * rows
        normal = slopes.T @ slopes
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), slopes.T @ off)
        off_there = measured - np.exp(rows @ (powers + step))
        fall = float(off @ off - off_there @ off_there)
        if fall < 0:
            damping *= 4
            continue
        powers, off, damping = powers + step, off_there, damping / 4
        if fall <= _ENOUGH * float(off @ off):
            break
    return powers


Curve = Sequence[tuple[int, float]]
"""Steps and loss of synchronous runs at their best rates, by steps."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """A factor in steps; None: the synchronous runs are not long or short enough to say."""

    factor: float | None
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.factor is None:
            return "-"
        ends = " to ".join("?" if end is None else f"{end:.2f}" for end in (self.low, self.high))
        return f"{self.factor:.2f} ({ends})"


def curves(losses: Losses) -> Mapping[Length, Curve]:
    """The synchronous curve by size, batch and optimizer: a length with 0 steps."""
    found: dict[Length, list[tuple[int, float]]] = {}
    for length, arms in sorted(losses.items()):
        if SYNCHRONOUS in arms:
            loss = float(np.mean(list(best(arms[SYNCHRONOUS]).losses.values())))
            found.setdefault(replace(length, steps=0), []).append((length.steps, loss))
    return found


def reach(curve: Curve, *, steps: int, gap: float, half_width: float) -> Reach:
    """What a gap after `steps` steps, and the ends of its interval, are in steps."""
    synchronous = dict(curve)[steps]

    def factor(difference: float) -> float | None:
        needed = steps_for(synchronous + difference, curve)
        return None if needed is None else steps / needed

    return Reach(factor=factor(gap), low=factor(gap - half_width), high=factor(gap + half_width))


def steps_for(loss: float, curve: Curve) -> float | None:
    """The steps after which synchronous runs have this loss; None outside of the curve."""
    for (fewer, high), (more, low) in pairwise(curve):
        if low <= loss <= high:
            share = (high - loss) / (high - low)
            return math.exp((1 - share) * math.log(fewer) + share * math.log(more))
    return None


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The loss of an arm minus that of the synchronous arm."""

    length: Length
    arm: str
    lr: float
    differences: Sequence[float]
    """By common seed."""
    on_edge: bool
    """The best rate of one of them is the lowest or the highest tried."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.differences))

    @property
    def interval(self) -> Interval | None:
        return paired(self.differences)


def gaps_at_best(losses: Losses) -> list[Gap]:
    """Each arm at its best rate compared with the synchronous one at its own."""
    found = []
    for length, arm, rates, synchronous in _delayed(losses):
        chosen, baseline = best(rates), best(synchronous)
        differences = _differences(chosen.losses, baseline.losses)
        if differences:
            edge = chosen.on_edge or baseline.on_edge
            found.append(Gap(length=length, arm=arm, lr=chosen.lr, differences=differences, on_edge=edge))
    return found


def gaps_at_equal(losses: Losses) -> list[Gap]:
    """Each arm compared with the synchronous one at the same rate, for rates up to the synchronous best.

    Above it both grow worse, for other reasons.
    """
    found = []
    for length, arm, rates, synchronous in _delayed(losses):
        highest = best(synchronous).lr
        for lr in sorted(lr for lr in set(rates) & set(synchronous) if lr <= highest):
            differences = _differences(rates[lr], synchronous[lr])
            if differences:
                found.append(Gap(length=length, arm=arm, lr=lr, differences=differences, on_edge=False))
    return found


def _delayed(
    losses: Losses,
) -> Iterator[tuple[Length, str, Mapping[float, Mapping[int, float]], Mapping[float, Mapping[int, float]]]]:
    for length, arms in sorted(losses.items()):
        for arm, rates in sorted(arms.items()):
            if arm != SYNCHRONOUS and SYNCHRONOUS in arms:
                yield length, arm, rates, arms[SYNCHRONOUS]


def _differences(losses: Mapping[int, float], baseline: Mapping[int, float]) -> list[float]:
    """By common seed; diverged runs have none."""
    pairs = [(losses[seed], baseline[seed]) for seed in sorted(set(losses) & set(baseline))]
    return [loss - base for loss, base in pairs if math.isfinite(loss) and math.isfinite(base)]


def page(losses: Losses, targets: Sequence[Mapping[str, float]]) -> str:
    lines = ["## Loss by rate", ""]
    lines += [f"| {_HEAD} | arm | best rate | loss | seeds | mean loss by rate |"]
    lines += [f"| {_RULE} | --- | ---: | ---: | ---: | --- |"]
    for length, arms in sorted(losses.items()):
        for arm, rates in sorted(arms.items()):
            chosen = best(rates)
            values = list(chosen.losses.values())
            spread = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
            edge = " (edge)" if chosen.on_edge else ""
            tried = ", ".join(f"{lr:g}: {loss:.3f}" for lr, loss in chosen.tried.items())
            lines.append(
                f"| {length} | {arm} | {chosen.lr:g}{edge} | {np.mean(values):.4f}{spread} | {len(values)} "
                f"| {tried} |"
            )
    at_best, at_equal = gaps_at_best(losses), gaps_at_equal(losses)
    lines += ["", "## Gap, each arm at its best rate", "", *_gap_table(at_best, curves(losses))]
    lines += [
        "",
        "## The law, each arm at its best rate",
        "",
        *_laws(at_best, targets=targets, with_rate=False),
    ]
    lines += ["", "## The law at equal rates", "", *_laws(at_equal, targets=targets, with_rate=True)]
    return "\n".join(lines)


def _gap_table(gaps: Sequence[Gap], of_steps: Mapping[Length, Curve]) -> list[str]:
    lines = [f"| {_HEAD} | arm | gap | 95 %, paired | seeds | in steps (95 %) |"]
    lines += [f"| {_RULE} | --- | ---: | ---: | ---: | ---: |"]
    for gap in gaps:
        interval = gap.interval
        between = "-" if interval is None else f"{interval.low:+.4f} to {interval.high:+.4f}"
        in_steps = reach(
            of_steps[replace(gap.length, steps=0)],
            steps=gap.length.steps,
            gap=gap.mean,
            half_width=math.nan if interval is None else interval.half_width,
        )
        numbers = f"{gap.mean:+.4f} | {between} | {len(gap.differences)} | {in_steps}"
        lines.append(f"| {gap.length} | {gap.arm} | {numbers} |")
    return lines


def _laws(gaps: Iterable[Gap], *, targets: Sequence[Mapping[str, float]], with_rate: bool) -> list[str]:
    lines, too_few = [], []
    for (optimizer, arm), group in _grouped(gaps).items():
        law = fitted(group, with_rate=with_rate)
        said = f"- {optimizer}, {arm}, {len(group)} gaps: "
        # Without several lengths it leads nowhere.
        if law is None or "steps" not in law.names:
            too_few.append(f"{optimizer}, {arm} ({len(group)})")
            continue
        powers = " ".join(
            f"({name})^({law.powers[i]:.2f} ± {law.interval(i):.2f})" for i, name in enumerate(law.names, 1)
        )
        off = ", ".join(f"{value:+.3f}" for value in law.residuals)
        lines.append(f"{said}{math.exp(law.powers[0]):.3g} {powers}; residuals {off}.")
        for given in targets:
            target = {name: value for name, value in given.items() if with_rate or name != "lr"}
            middle, low, high = law.predict(target)
            left = [name for name in target if name not in law.names]
            rest = f", if {' and '.join(left)} do not matter" if left else ""
            where = ", ".join(
                f"a rate of {value:g}" if name == "lr" else f"{value:,.0f} {name}"
                for name, value in target.items()
            )
            lines.append(f"  At {where}: {middle:+.4f} (95 %: {low:+.4f} to {_bound(high)}){rest}.")
    if too_few:
        lines.append(f"- Too few gaps or lengths for a law: {'; '.join(too_few)}.")
    return lines


def _bound(high: float) -> str:
    """Of a loss in nats; a guess from one power too many is without one."""
    return f"{high:+.4f}" if high < 100 else "more than 100"


def fitted(gaps: Sequence[Gap], *, with_rate: bool) -> PowerLaw | None:
    rows = [{**gap.length.factors, **({"lr": gap.lr} if with_rate else {})} for gap in gaps]
    return fit([gap.mean for gap in gaps], {name: [row[name] for row in rows] for name in rows[0]})


def _grouped(gaps: Iterable[Gap]) -> dict[tuple[str, str], list[Gap]]:
    groups: dict[tuple[str, str], list[Gap]] = defaultdict(list)
    for gap in gaps:
        groups[gap.length.optimizer, gap.arm].append(gap)
    return groups


if __name__ == "__main__":
    published = Length("", parameters=360_000_000, tokens_per_step=262_144, steps=27_466)
    print(page(read(), [{**published.factors, "lr": 1e-3}]))
