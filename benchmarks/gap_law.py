"""How the gap to synchronous training falls with steps, batch and size, and grows with the rate: two laws.

    python -m benchmarks.gap_law SOURCE... [--where KEY=VALUE] [--predict SIZE,TOKENS,STEPS,LR]
                                 [--figure FILE] [--csv FILE]

A source is an experiment with `optimizer.lr` among its axes (templates/experiments/gap-map.yaml), or a file
that `--csv` made. An arm is a schedule with or without error feedback; of experiments with further axes
`--where` takes a part. One law is of the gaps with each arm at its best rate (benchmarks/best_rates.py), the
other of those at equal rates. Each is a product of powers (benchmarks/power_law.py); what the sources do not
vary is not in it. A gap is also given in steps (benchmarks/steps_cost.py).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from asyncpp_cli.report.analysis.statistics import Interval, paired
from benchmarks.best_rates import best
from benchmarks.gap_losses import SYNCHRONOUS, Length, Losses, read, write_csv
from benchmarks.power_law import PowerLaw, fit
from benchmarks.steps_cost import Curve, curves, reach

_HEAD, _RULE = "optimizer | parameters | tokens a step | steps", "--- | ---: | ---: | ---:"


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
    """Each arm at its best rate beside the synchronous one at its own."""
    found = []
    for length, arm, rates, synchronous in _delayed(losses):
        chosen, baseline = best(rates), best(synchronous)
        differences = _differences(chosen.losses, baseline.losses)
        if differences:
            edge = chosen.on_edge or baseline.on_edge
            found.append(Gap(length=length, arm=arm, lr=chosen.lr, differences=differences, on_edge=edge))
    return found


def gaps_at_equal(losses: Losses) -> list[Gap]:
    """Each arm beside the synchronous one at the same rate: rates that both have, up to the synchronous best.

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


def draw(gaps: Sequence[Gap], file: Path) -> None:
    """Gap over steps: a panel for each optimizer and arm that has several lengths; the law is dotted."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    groups = {
        name: group for name, group in _grouped(gaps).items() if len({gap.length.steps for gap in group}) > 1
    }
    figure = Figure(figsize=(3.2 * len(groups), 3.4), layout="constrained")
    panels = figure.subplots(1, len(groups), sharex=True, sharey=True, squeeze=False)[0]
    sizes = sorted({replace(gap.length, optimizer="", steps=0) for gap in gaps})
    for axes, ((optimizer, arm), group) in zip(panels, groups.items(), strict=True):
        law = fitted(group, with_rate=False)
        for index, size in enumerate(sizes):
            line = [gap for gap in group if replace(gap.length, optimizer="", steps=0) == size]
            if not line:
                continue
            color = f"C{index}"
            axes.errorbar(
                [gap.length.steps for gap in line],
                [gap.mean for gap in line],
                yerr=[0.0 if gap.interval is None else gap.interval.half_width for gap in line],
                fmt="os^Dv*"[index % 6],
                color=color,
                capsize=3,
                label=f"{size.parameters:,} parameters, {size.tokens_per_step:,} tokens a step",
            )
            if law is not None:
                steps = np.geomspace(200, 30_000, 50)
                of_size = [law.predict(replace(size, steps=int(n)).factors)[0] for n in steps]
                axes.plot(steps, of_size, ":", color=color)
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.set(xscale="log", title=f"{optimizer}, {arm}", xlabel="steps")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("gap in validation loss (nats per token)")
    handles = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, fontsize=8)
    # The same gaps are the same file.
    with mpl.rc_context({"svg.hashsalt": "asyncpp"}):
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _target(text: str) -> Mapping[str, float]:
    *counts, lr = text.split(",")
    try:
        parameters, tokens, steps = (int(part) for part in counts)
        length = Length(optimizer="", parameters=parameters, tokens_per_step=tokens, steps=steps)
        return {**length.factors, "lr": float(lr)}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}, accepted: SIZE,TOKENS,STEPS,LR") from None


def _axis(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r}, accepted: KEY=VALUE")
    return key, value


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("sources", nargs="+", metavar="SOURCE")
    parser.add_argument("--where", action="append", default=[], type=_axis, metavar="KEY=VALUE")
    parser.add_argument(
        "--predict", action="append", default=[], type=_target, metavar="SIZE,TOKENS,STEPS,LR"
    )
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    losses = read(options.sources, where=dict(options.where))
    sys.stdout.write(page(losses, options.predict) + "\n")
    if options.figure is not None:
        draw(gaps_at_best(losses), options.figure)
    if options.csv is not None:
        write_csv(losses, options.csv)


if __name__ == "__main__":
    main()
