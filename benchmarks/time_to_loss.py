"""Time to the loss that synchronous AdamW ends at, for a delayed arm, from runs of several lengths.

    python -m benchmarks.time_to_loss EXPERIMENT... --arm 'ARM' --step-times 1.87,1.88,1.87

The experiments have `optimizer.lr` among their axes, and the delayed arm at several lengths, each run with a
learning rate that falls to its own end. ARM is named as benchmarks/delay_candidates.py names it. The step
times are those of the synchronous schedule over those of the delayed one, one for each round of
benchmarks/pipeline.py.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from asyncpp_cli.report.analysis.statistics import Interval, paired
from benchmarks.best_rates import best
from benchmarks.delay_candidates import Arm, read


def steps_to(loss: float, losses: Mapping[int, float]) -> float | None:
    """Length of the run that ends at a loss, between two lengths along a line over the logarithm.

    Args:
        loss: to reach.
        losses: at the end, by number of steps; falling.

    Returns:
        None if no length tried reaches the loss, or the shortest one is already below it.
    """
    for (short, high), (long, low) in pairwise(sorted(losses.items())):
        if low <= loss <= high:
            share = (high - loss) / (high - low) if high > low else 0.0
            return math.exp((1 - share) * math.log(short) + share * math.log(long))
    return None


def time_ratio(step_ratios: Sequence[float], step_times: Sequence[float]) -> tuple[float, float, float]:
    """Time of the delayed arm over that of the synchronous one, and the bounds of its 95 % interval.

    Errors of the two logarithms are independent and add as squares.

    Args:
        step_ratios: steps of the delayed arm over those of the synchronous one, by seed.
        step_times: of a synchronous step over a delayed one, by round.
    """
    steps = paired([math.log(ratio) for ratio in step_ratios])
    times = paired([math.log(ratio) for ratio in step_times])
    middle = float(np.mean(np.log(step_ratios)) - np.mean(np.log(step_times)))
    reach = math.hypot(_half_width(steps), _half_width(times))
    return math.exp(middle), math.exp(middle - reach), math.exp(middle + reach)


def _half_width(interval: Interval | None) -> float:
    if interval is None:
        raise SystemExit("an interval needs two seeds and two step times at least")
    return interval.half_width


def page(losses: Mapping[Arm, Mapping[float, Mapping[int, float]]], name: str, times: Sequence[float]) -> str:
    """A table of the seeds, and the ratio."""
    baseline = min(arm for arm in losses if arm.is_baseline)
    ends = best(losses[baseline]).losses
    lengths = {arm.steps: best(rates).losses for arm, rates in losses.items() if arm.name == name}
    if len(lengths) < 2:
        raise SystemExit(f"{name!r} has runs of {len(lengths)} lengths, two are needed")
    seeds = sorted(set(ends).intersection(*lengths.values()))
    lines = [f"Synchronous AdamW: {baseline.steps:,} steps. Delayed: {name}.", ""]
    heads = [f"delayed, {steps:,} steps" for steps in sorted(lengths)]
    lines += [
        "| seed | synchronous loss | " + " | ".join(heads) + " | steps to that loss | over the synchronous |"
    ]
    lines += ["| ---: |" + " ---: |" * (len(heads) + 3)]
    ratios = []
    for seed in seeds:
        by_length = {steps: found[seed] for steps, found in sorted(lengths.items())}
        row = [str(seed), f"{ends[seed]:.4f}", *(f"{loss:.4f}" for loss in by_length.values())]
        steps = steps_to(ends[seed], by_length)
        if steps is None:
            lines.append("| " + " | ".join([*row, "not among these", "-"]) + " |")
            continue
        ratios.append(steps / baseline.steps)
        lines.append("| " + " | ".join([*row, f"{steps:,.0f}", f"{ratios[-1]:.3f}"]) + " |")
    if len(ratios) == len(seeds):
        ratio, low, high = time_ratio(ratios, times)
        lines += ["", f"Step of the synchronous schedule over the delayed one: {np.mean(times):.3f}."]
        lines += [
            f"Time to the synchronous loss: {ratio:.3f} of the synchronous time "
            f"(95 %: {low:.3f} to {high:.3f})."
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("experiments", nargs="+")
    parser.add_argument("--arm", required=True)
    parser.add_argument("--step-times", required=True)
    options = parser.parse_args()
    times = [float(text) for text in options.step_times.split(",")]
    print(page(read(options.experiments), options.arm, times))


if __name__ == "__main__":
    main()
