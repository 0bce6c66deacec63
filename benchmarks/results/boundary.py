"""Where a delay begins to pay over slow links: time to the same loss, from speeds and losses.

    python -m benchmarks.results.boundary [--figure FILE.svg]

Prints the tables of boundary-2026-11-28.md from its raw files. The time of an arm is k, the factor in steps
to the loss of synchronous training with the same batch, times its seconds per step. A twice as large batch is
a synchronous choice with a k of its own.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from asyncpp_cli.report.analysis.statistics import Interval, paired
from asyncpp_cli.report.analysis.steps_to_loss import NoRatioError, StepsRatio, steps_ratio
from asyncpp_cli.report.analysis.verdict import answer_of
from benchmarks.results.blocks import rows_of

HERE = Path(__file__).parent
NAME = "boundary-2026-11-28"

BATCHES = (8, 32)
"""Sequences per step of the arms."""
STEPS = 1_200
"""Of the synchronous arm."""
SYNCHRONOUS = ("fully_shard", "1f1b", "zb-v")
OTHERS = {"2bw": "2bw, error feedback", "local": "local steps"}
DOUBLED = "twice the batch"
LATER = range(3, 8)
"""Seeds that were added after a look at those before them: what these say alone must agree."""

Speeds = Mapping[tuple[float, int], Mapping[str, Sequence[float]]]
"""Seconds per step by round, by Mbit/s, sequences and arm."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An arm at a batch, of so many steps to the loss."""

    arm: str
    sequences: int
    steps: StepsRatio | None
    """None: as many as synchronous training with the same batch, by definition."""

    def __str__(self) -> str:
        name = OTHERS.get(self.arm, f"`{self.arm}`")
        return name + f", {DOUBLED}" * (self.sequences not in BATCHES)

    @property
    def ratio(self) -> float:
        """k."""
        return 1.0 if self.steps is None else self.steps.ratio


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A time over another, with an interval; None: its end is beyond the lengths that ran."""

    middle: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        ends = " to ".join("?" if end is None else f"{end:.2f}" for end in (self.low, self.high))
        return f"{self.middle:.2f} ({ends})"

    @property
    def verdict(self) -> str:
        return answer_of(self.low, self.high)


def speeds(name: str = f"{NAME}-speed") -> tuple[Speeds, Mapping[tuple[float, int], Mapping[str, float]]]:
    """What was measured, and what the planner says of the same points.

    Args:
        name: of the raw file.
    """
    measured: dict[tuple[float, int], dict[str, list[float]]] = {}
    planned: dict[tuple[float, int], dict[str, float]] = {}
    for row in rows_of(name):
        place = float(row["mbit_s"]), int(row["sequences"])
        measured.setdefault(place, {}).setdefault(row["arm"], []).append(float(row["seconds"]))
        planned.setdefault(place, {})[row["arm"]] = float(row["planned"])
    return measured, planned


def losses(seeds: Container[int]) -> Mapping[tuple[str, int], Mapping[int, Mapping[int, float]]]:
    """The last validation loss by arm and sequences per step, by steps and seed."""
    found: dict[tuple[str, int], dict[int, dict[int, float]]] = {}
    for row in rows_of(NAME):
        if int(row["seed"]) not in seeds:
            continue
        of = found.setdefault((row["arm"], int(row["sequences"])), {})
        of.setdefault(int(row["steps"]), {})[int(row["seed"])] = float(row["val_loss"])
    return found


@cache
def choices(
    batch: int, seeds: Container[int] = range(LATER.stop)
) -> tuple[list[Choice], list[Choice], list[str]]:
    """The synchronous choices of a batch, the others, and what could not be told."""
    of = losses(seeds)
    goal = of["synchronous", batch][STEPS]
    synchronous = [Choice(arm=arm, sequences=batch, steps=None) for arm in SYNCHRONOUS]
    others, unknown = [], []
    for arm, sequences in (("synchronous", 2 * batch), *((arm, batch) for arm in OTHERS)):
        try:
            steps = steps_ratio(steps=STEPS, loss=goal, delayed=of[arm, sequences])
        except NoRatioError as error:
            unknown.append(f"{arm}, {sequences} sequences: {error}")
            continue
        if arm == "synchronous":
            synchronous += [Choice(arm=each, sequences=sequences, steps=steps) for each in SYNCHRONOUS]
        else:
            others.append(Choice(arm=arm, sequences=sequences, steps=steps))
    return synchronous, others, unknown


def seconds(choice: Choice, rate: float, of: Speeds) -> float:
    """Of as many steps as one of synchronous training with the same batch is worth."""
    return choice.ratio * median(of[rate, choice.sequences][choice.arm])


def over(choice: Choice, other: Choice, rate: float, of: Speeds) -> Ratio:
    """Time to the loss over that of another choice.

    Errors of both k by the seeds and of the speeds by the rounds are independent, and add as squares; what
    the curves allow between lengths adds to them (`steps_to_loss.time_interval`).
    """
    pairs = zip(of[rate, choice.sequences][choice.arm], of[rate, other.sequences][other.arm], strict=True)
    speed = paired([math.log(first / second) for first, second in pairs])
    assert speed is not None
    middle = math.log(choice.ratio / other.ratio)
    low = _end(choice.steps, other.steps, speed, below=True)
    high = _end(choice.steps, other.steps, speed, below=False)
    centre = (speed.low + speed.high) / 2
    return Ratio(
        middle=math.exp(middle + centre),
        low=None if low is None else math.exp(centre + low),
        high=None if high is None else math.exp(centre + high),
    )


def alone(choice: Choice, other: Choice, batch: int, rate: float, of: Speeds) -> Ratio | None:
    """The same as `LATER` alone have it; None: they cannot tell."""
    synchronous, others, _ = choices(batch, LATER)
    found = {(each.arm, each.sequences): each for each in synchronous + others}
    first, second = (found.get((each.arm, each.sequences)) for each in (choice, other))
    return None if first is None or second is None else over(first, second, rate, of)


def verdict(ratio: Ratio, by_later: Ratio | None) -> str:
    """Of all seeds, where those that came later say the same."""
    agree = by_later is not None and by_later.verdict == ratio.verdict
    return ratio.verdict if agree else "undecided"


def _end(
    first: StepsRatio | None, second: StepsRatio | None, speed: Interval, *, below: bool
) -> float | None:
    """An end of the interval of the logarithm of k over k, with the error of the speeds."""
    parts = []
    if first is not None:
        parts.append((first.by_curve[0 if below else 1], first.low if below else first.high, 1))
    if second is not None:
        parts.append((second.by_curve[1 if below else 0], second.high if below else second.low, -1))
    centre, squares = 0.0, speed.half_width**2
    for by_curve, end, sign in parts:
        if end is None:
            return None
        centre += sign * math.log(by_curve)
        squares += math.log(end / by_curve) ** 2
    return centre + (-1 if below else 1) * math.sqrt(squares)


def best_of(synchronous: Sequence[Choice], rate: float, measured: Speeds) -> Choice:
    return min(synchronous, key=lambda choice: seconds(choice, rate, measured))


def page() -> Iterator[str]:
    """The tables of the page, and sentences that rest on them, line by line."""
    measured, planned = speeds()
    rates = sorted({rate for rate, _ in measured})
    yield "| sequences | arm | steps to the loss, over synchronous |"
    yield "| ---: | --- | --- |"
    for batch in BATCHES:
        synchronous, others, unknown = choices(batch)
        shown = [choice for choice in synchronous if choice.steps is not None][:1] + others
        for choice in shown:
            assert choice.steps is not None
            name = DOUBLED if choice.arm in SYNCHRONOUS else str(choice)
            ratio = Ratio(middle=choice.ratio, low=choice.steps.low, high=choice.steps.high)
            yield f"| {batch} | {name} | {ratio} |"
        yield from unknown
    yield ""
    names = [f"{name}, over it | later seeds alone | | as planned" for name in OTHERS.values()]
    yield f"| sequences | Mbit/s | best synchronous choice | `fully_shard`, over it | {' | '.join(names)} |"
    yield f"| ---: | ---: | --- | --- |{' --- | --- | --- | --- |' * len(OTHERS)}"
    for batch in BATCHES:
        synchronous, others, _ = choices(batch)
        for rate in rates:
            best = best_of(synchronous, rate, measured)
            row = f"| {batch} | {rate:,.0f} | {best} | {over(synchronous[0], best, rate, measured)} |"
            for choice in others:
                ratio = over(choice, best, rate, measured)
                as_planned = choice.ratio * planned[rate, choice.sequences][choice.arm]
                as_planned /= best.ratio * planned[rate, best.sequences][best.arm]
                by_later = alone(choice, best, batch, rate, measured)
                row += f" {ratio} | {by_later} | {verdict(ratio, by_later)} | {as_planned:.2f} |"
            yield row
    for batch in BATCHES:
        synchronous, (delayed, *_), _ = choices(batch)
        paid = 0
        for rate in rates:
            best = best_of(synchronous, rate, measured)
            by_later = alone(delayed, best, batch, rate, measured)
            paid += verdict(over(delayed, best, rate, measured), by_later) == "pays"
        yield f"with {batch} sequences `2bw` pays at {paid} of {len(rates)} links"
    for arm in ("1f1b", "fully_shard"):
        yield _compared(arm, rates, measured)
    yield ""
    yield "| sequences | Mbit/s | arm | ms per step | planned / measured |"
    yield "| ---: | ---: | --- | ---: | ---: |"
    within = []
    for (rate, sequences), of_arms in sorted(measured.items(), key=lambda item: item[0][::-1]):
        for arm in (*SYNCHRONOUS, *OTHERS):
            of_arm = median(of_arms[arm])
            off = planned[rate, sequences][arm] / of_arm
            within.append(0.9 <= off <= 1.1)
            yield f"| {sequences} | {rate:,.0f} | `{arm}` | {1e3 * of_arm:,.0f} | {off:.2f} |"
    yield f"{sum(within)} of {len(within)} planned steps are within 10 % of the measured ones"
    yield ""
    yield "| sequences | arm | loss by rate |"
    yield "| ---: | --- | --- |"
    of_arms_choice: dict[tuple[int, str], dict[float, float]] = {}
    for line in rows_of(f"{NAME}-choice"):
        key = int(line["sequences"]), line["arm"]
        of_arms_choice.setdefault(key, {})[float(line["lr"])] = float(line["val_loss"])
    for (sequences, arm), of_rates in sorted(of_arms_choice.items()):
        losses_by_rate = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in sorted(of_rates.items()))
        yield f"| {sequences} | {OTHERS.get(arm, arm)} | {losses_by_rate} |"


def _compared(arm: str, rates: Sequence[float], measured: Speeds) -> str:
    """The delay beside a synchronous arm of the same batch, over all points."""
    ratios, pays = [], 0
    for batch in BATCHES:
        synchronous, (delayed, *_), _ = choices(batch)
        same = synchronous[SYNCHRONOUS.index(arm)]
        for rate in rates:
            ratios.append(over(delayed, same, rate, measured))
            pays += verdict(ratios[-1], alone(delayed, same, batch, rate, measured)) == "pays"
    low, high = min(each.middle for each in ratios), max(each.middle for each in ratios)
    return f"`{arm}`: {low:.2f} to {high:.2f} of its time, and less at {pays} of {len(ratios)} points"


def readme() -> Iterator[str]:
    """Rows of the README's table: times at the slowest link and the fastest."""
    measured, _ = speeds()
    slowest, *_, fastest = sorted({rate for rate, _ in measured})
    for batch in BATCHES:
        synchronous, (delayed, *_), _ = choices(batch)
        ratios = []
        for rate in (slowest, fastest):
            best = best_of(synchronous, rate, measured)
            ratios.append(over(delayed, best, rate, measured))
        yield (
            f"| 4 stages, {batch} sequences per step, links of {slowest:,.0f} Mbit/s; "
            f"of {fastest / 1e3:g} Gbit/s | {ratios[0]}; {ratios[1]} |"
        )


def draw(file: Path) -> None:
    """Time to the same loss over that of `1f1b` with the same batch, by link: a panel for each batch."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = NAME
    measured, _ = speeds()
    rates = sorted({rate for rate, _ in measured})
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    panels = figure.subplots(1, len(BATCHES), sharey=True)
    for panel, batch in zip(panels, BATCHES, strict=True):
        synchronous, others, _ = choices(batch)
        shard, f1b, *_ = synchronous
        pipelines = [choice for choice in synchronous if choice.arm != "fully_shard"]
        same = [choice for choice in pipelines if choice.sequences == batch]
        doubled = [choice for choice in synchronous if choice.sequences != batch]
        lines = [
            ("FSDP, same batch", [shard], "#56B4E9", "s"),
            ("best synchronous pipeline, same batch", same, "#000000", "o"),
            ("best synchronous choice, twice the batch", doubled, "#E69F00", "D"),
            *(
                (OTHERS[choice.arm], [choice], colour, marker)
                for choice, colour, marker in zip(others, ("#D55E00", "#009E73"), "^x", strict=False)
            ),
        ]
        for place, (name, candidates, colour, marker) in enumerate(lines):
            if not candidates:
                continue
            found = [
                over(min(candidates, key=lambda each: seconds(each, rate, measured)), f1b, rate, measured)
                for rate in rates
            ]
            middles = [each.middle for each in found]
            below = [each.middle - (each.low or each.middle) for each in found]
            above = [(each.high or each.middle) - each.middle for each in found]
            # Moved aside a little, so that error bars do not hide each other.
            places = [rate * 1.04 ** (place - 2) for rate in rates]
            panel.errorbar(
                places, middles, [below, above], color=colour, marker=marker, label=name, capsize=2, lw=1.2
            )
        panel.set(
            xscale="log", yscale="log", title=f"{batch} sequences per step", xlabel="Mbit/s of a rank's link"
        )
        panel.set_xticks(rates, [f"{rate:,.0f}" for rate in rates])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("time to the same loss\nover that of 1F1B")
    ticks = [0.5, 0.7, 1, 1.5, 2, 3, 5, 10]
    panels[0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    panels[-1].legend(fontsize=7)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figure", type=Path, help="draw the times into this file")
    options = parser.parse_args()
    print(*page(), sep="\n")
    if options.figure:
        draw(options.figure)


if __name__ == "__main__":
    main()
