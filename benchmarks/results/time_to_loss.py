"""Time to the loss that synchronous training ends at, for a delayed arm, from runs of several lengths.

The method of delayed-adamw-2026-11-22.md and gap-map-2026-11-23.md, where not all seeds have all lengths:
the delayed arm's loss is a line over the logarithm of the steps, with one slope for all seeds.
`asyncpp report` asks the same of an experiment whose lengths all have the same seeds, without a common slope.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asyncpp_cli.report.analysis.statistics import Interval, paired, t_quantile
from benchmarks.results.best_rates import best
from benchmarks.results.delayed_adamw import Arm


@dataclass(frozen=True, kw_only=True)
class Line:
    """The common slope of the loss over the logarithm of the steps."""

    slope: float
    half_width: float
    """Of its 95 % interval."""


def common_slope(losses: Mapping[int, Mapping[int, float]]) -> Line:
    """By least squares, with a height for each seed.

    Args:
        losses: by seed and number of steps.

    Raises:
        SystemExit: too few runs for a slope, or one whose interval holds zero.
    """
    runs = sum(map(len, losses.values()))
    freedom = runs - len(losses) - 1
    if freedom < 1:
        raise SystemExit(f"{runs} delayed runs of {len(losses)} seeds are too few for a slope")
    x = np.concatenate([_centred([math.log(steps) for steps in ends]) for ends in losses.values()])
    y = np.concatenate([_centred(list(ends.values())) for ends in losses.values()])
    spread = float(x @ x)
    if spread == 0:
        raise SystemExit("a slope needs two lengths of a seed")
    slope = float(x @ y) / spread
    rest = y - slope * x
    half_width = t_quantile(0.975, freedom) * math.sqrt(float(rest @ rest) / freedom / spread)
    if slope + half_width >= 0:
        raise SystemExit(f"the loss does not fall with the steps: a slope of {slope:.3f} +- {half_width:.3f}")
    return Line(slope=slope, half_width=half_width)


def _centred(values: Sequence[float]) -> np.ndarray:
    return np.array(values) - np.mean(values)


def steps_to(loss: float, losses: Mapping[int, float], slope: float) -> float:
    """Length of the run that ends at a loss, on the line of a slope through the mean of the runs."""
    middle = float(np.mean([math.log(steps) for steps in losses]))
    return math.exp(middle + (loss - float(np.mean(list(losses.values())))) / slope)


def time_ratio(
    step_ratios: Sequence[float], step_times: Sequence[float], *, from_slope: float
) -> tuple[float, float, float]:
    """Time of the delayed arm over that of the synchronous one, and the bounds of its 95 % interval.

    Errors of the logarithms are independent and add as squares.

    Args:
        step_ratios: steps of the delayed arm over those of the synchronous one, by seed.
        step_times: of a synchronous step over a delayed one, by round.
        from_slope: what the slope's error is worth in the logarithm of the mean of `step_ratios`.
    """
    steps = paired([math.log(ratio) for ratio in step_ratios])
    times = paired([math.log(ratio) for ratio in step_times])
    middle = float(np.mean(np.log(step_ratios)) - np.mean(np.log(step_times)))
    reach = math.hypot(_half_width(steps), _half_width(times), from_slope)
    return math.exp(middle), math.exp(middle - reach), math.exp(middle + reach)


def _half_width(interval: Interval | None) -> float:
    if interval is None:
        raise SystemExit("an interval needs two seeds and two step times at least")
    return interval.half_width


def page(
    losses: Mapping[Arm, Mapping[float, Mapping[int, float]]],
    name: str,
    times: Sequence[float],
    *,
    synchronous_arm: str,
) -> str:
    """A table of the seeds, and the ratio. A length's losses are those at its best rate.

    Args:
        losses: by arm, rate and seed.
        name: of the delayed arm.
        times: of a synchronous step over a delayed one, by round.
        synchronous_arm: its optimizer, or its name if several have that optimizer.
    """
    delayed: dict[int, dict[int, float]] = {}
    for arm, rates in losses.items():
        for seed, loss in best(rates).losses.items() if arm.name == name else ():
            delayed.setdefault(seed, {})[arm.steps] = loss
    lengths = sorted({steps for ends in delayed.values() for steps in ends})
    baselines = [
        arm
        for arm in losses
        if arm.steps in lengths and (arm.name == synchronous_arm or arm.is_synchronous(synchronous_arm))
    ]
    if not baselines:
        raise SystemExit(f"no synchronous {synchronous_arm} at a length of {name!r}")
    # Of several, the one with the most seeds.
    baseline = max(baselines, key=lambda arm: len(best(losses[arm]).losses))
    synchronous = best(losses[baseline]).losses
    line = common_slope(delayed)
    heads = [f"delayed, {steps:,} steps" for steps in lengths]
    lines = [
        f"Synchronous {synchronous_arm}: {baseline.steps:,} steps. Delayed: {name}; its loss changes by "
        f"{line.slope:.3f} +- {line.half_width:.3f} when the steps are e times as many.",
        "",
        "| seed | synchronous loss | " + " | ".join(heads) + " | steps to that loss | over the synchronous |",
        "| ---: |" + " ---: |" * (len(heads) + 3),
    ]
    ratios, shifts = [], []
    for seed in sorted(set(synchronous) & set(delayed)):
        ends = delayed[seed]
        steps = steps_to(synchronous[seed], ends, line.slope)
        ratios.append(steps / baseline.steps)
        shifts.append(math.log(steps) - float(np.mean([math.log(length) for length in ends])))
        cells = [f"{ends[length]:.4f}" if length in ends else "" for length in lengths]
        lines.append(
            f"| {seed} | {synchronous[seed]:.4f} | {' | '.join(cells)} | {steps:,.0f} | {ratios[-1]:.3f} |"
        )
    # A slope that is off by a share moves each length by that share of its way from the middle of the runs.
    from_slope = abs(float(np.mean(shifts)) * line.half_width / line.slope)
    ratio, low, high = time_ratio(ratios, times, from_slope=from_slope)
    steps_alone, *bounds = time_ratio(ratios, [1.0, 1.0], from_slope=from_slope)
    lines += [
        "",
        f"Steps to the synchronous loss: {steps_alone:.3f} of the synchronous steps "
        f"(95 %: {bounds[0]:.3f} to {bounds[1]:.3f}).",
        f"Step of the synchronous schedule over the delayed one: {np.mean(times):.3f}.",
        f"Time to the synchronous loss: {ratio:.3f} of the synchronous time (95 %: {low:.3f} to {high:.3f}).",
    ]
    return "\n".join(lines)
