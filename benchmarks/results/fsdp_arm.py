"""`schedule: fsdp` beside the bare loop of `fully_shard`, and in its place where a delay begins to pay."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from benchmarks.results import boundary

NAME = "fsdp-2026-11-29"


def page() -> Iterator[str]:
    """The tables of the page, and sentences that rest on them, line by line."""
    measured, planned = boundary.speeds(f"{NAME}-two-ranks")
    within = []
    for (rate, sequences), arms in sorted(measured.items()):
        bare, ours = median(arms["fully_shard"]), median(arms["fsdp"])
        off = planned[rate, sequences]["fsdp"] / ours
        within.append(ours < 1.05 * bare and 0.9 < off < 1.1)
        seconds = f"{1e3 * bare:,.0f} | {1e3 * ours:,.0f} | {ours / bare:.2f}"
        yield f"| {rate:,.0f} | {sequences} | {seconds} | {off:.2f} |"
    yield f"{sum(within)} of {len(within)} points"
    yield from _four_ranks()


def _four_ranks() -> Iterator[str]:
    """The points of the boundary: seconds over those of then, and `2bw` over the best synchronous choice."""
    then, _ = boundary.speeds()
    now, planned = boundary.speeds(f"{NAME}-four-ranks")
    within = []
    for (rate, sequences), arms in sorted(now.items(), key=lambda item: item[0][::-1]):
        again = [median(arms[arm]) / median(then[rate, sequences][arm]) for arm in ("1f1b", "zb-v", "2bw")]
        ours = median(arms["fsdp"])
        bare = median(arms["fully_shard"])
        off = planned[rate, sequences]["fsdp"] / ours
        within.append(0.9 < off < 1.1)
        shown = " | ".join(f"{ratio:.2f}" for ratio in (*again, ours / bare, off))
        yield f"| {sequences} | {rate:,.0f} | {shown} |"
    yield f"{sum(within)} of {len(within)} planned steps of `fsdp`"
    with_ours = {place: {**arms, "fully_shard": arms["fsdp"]} for place, arms in now.items()}
    near = []
    for batch in boundary.BATCHES:
        synchronous, (delayed, *_), _ = boundary.choices(batch)
        for rate in sorted({rate for rate, _ in now}):
            ratios = []
            for speeds in (then, with_ours):
                best = boundary.best_of(synchronous, rate, speeds)
                ratios.append(boundary.seconds(delayed, rate, speeds) / boundary.seconds(best, rate, speeds))
            near.append(abs(ratios[1] / ratios[0] - 1) <= 0.03)
            yield f"| {batch} | {rate:,.0f} | {best} | {ratios[0]:.2f} | {ratios[1]:.2f} |"
    yield f"{sum(near)} of {len(near)} ratios"
