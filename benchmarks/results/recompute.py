"""Recomputes tables of result pages, and sentences that rest on them, from the raw files next to the pages.

    python -m benchmarks.results.recompute [--write]

Prints each line that a document should contain and does not, and what a page lacks by the rule of README.md
here; --write renews the index in that file. A page whose raw numbers are in CSV files has a
function here that yields its lines; documents that quote such a page have one, too.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean, median, stdev
from typing import Any, TypeVar

from asyncpp_cli.report.analysis.statistics import Spread, paired, welch
from asyncpp_cli.report.analysis.steps_to_loss import NoRatioError, steps_ratio
from benchmarks.results import boundary, fsdp_arm, pages
from benchmarks.results import delayed_adamw as delayed
from benchmarks.results import gap_map as law
from benchmarks.results.best_rates import best
from benchmarks.results.blocks import Difference, Losses, Row, blocks_of, difference, rows_of
from schedules import build
from schedules.costs import uniform_costs
from schedules.step_time import step_graph_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"

DELAYED_ADAMW = "delayed-adamw-2026-11-22"
GAP_MAP = "gap-map-2026-11-23"


def missing(document: Path, expected: Iterator[str]) -> list[str]:
    """The expected pieces of text that a document lacks; any run of white space counts as one space."""
    text = _plain(document.read_text(encoding="utf-8"))
    return [piece for part in expected for piece in part.splitlines() if _plain(piece) not in text]


def _plain(text: str) -> str:
    return " ".join(text.replace("**", "").split())


def delayed_adamw() -> Iterator[str]:
    """Tables and rank correlations of the lengths that the page shows, and gaps that its text repeats."""
    losses = delayed.read()
    for section in delayed.page(losses).split("## ")[1:]:
        steps, _, body = section.partition(" steps")
        if steps in ("300", "1,200", "4,800", "19,200"):
            yield from filter(str.strip, body.splitlines())
    for steps in (4_800, 19_200):
        yield _gap(losses, steps, QHADAMW)
    for arm in (QHADAMW, {**QHADAMW, "optimizer.beta1": "0.975", "optimizer.momentum_weight": "0.55"}):
        yield _gap(losses, 4_800, arm, {**arm, "schedule": "1f1b"})
    yield from _lengths(losses)


STEP_TIMES = [1.843, 1.867, 1.863, 1.863, 1.868]
"""Measured steps of 1f1b over those of 2bw at m = p = 8, by round: from a page, without a raw file."""


def _lengths(losses: delayed.Losses) -> Iterator[str]:
    """Losses of delayed `qhadamw` at several lengths, each at its best rate, beside synchronous AdamW."""
    synchronous, *delayed_ones = (
        next(
            best(rates).losses
            for arm, rates in losses.items()
            if (arm.steps, dict(arm.settings)) == (steps, settings)
        )
        for steps, settings in ((4_800, ADAMW), (3_200, QHADAMW), (4_800, QHADAMW), (7_200, QHADAMW))
    )
    for seed in sorted(synchronous):
        cells = (f"{of[seed]:.4f}" if seed in of else "" for of in (synchronous, *delayed_ones))
        yield f"| {seed} | {' | '.join(cells)} |"
    try:
        steps_ratio(
            steps=4_800, loss=synchronous, delayed=dict(zip((3_200, 4_800, 7_200), delayed_ones, strict=True))
        )
    except NoRatioError as error:
        yield str(error)


QHADAMW = {
    "schedule": "2bw",
    "optimizer": "qhadamw",
    "optimizer.beta1": "0.95",
    "optimizer.momentum_weight": "0.75",
}
ADAMW = {"schedule": "1f1b", "optimizer": "adamw", "optimizer.beta1": "0.9"}


def _gap(
    losses: delayed.Losses, steps: int, arm: Mapping[str, str], baseline: Mapping[str, str] = ADAMW
) -> str:
    """Mean difference of two arms, each at its best rate, paired by seed, with its interval."""
    return _shown(_differences(losses, steps, arm, baseline))


def _differences(
    losses: delayed.Losses, steps: int, arm: Mapping[str, str], baseline: Mapping[str, str]
) -> list[float]:
    ends, synchronous = (
        next(
            best(rates).losses
            for of, rates in losses.items()
            if (of.steps, dict(of.settings)) == (steps, key)
        )
        for key in (arm, baseline)
    )
    return [ends[seed] - synchronous[seed] for seed in sorted(ends.keys() & synchronous.keys())]


def _shown(differences: Sequence[float]) -> str:
    interval = paired(differences)
    assert interval is not None
    middle = (interval.low + interval.high) / 2
    return f"{middle:+.3f} ({interval.low:+.3f} to {interval.high:+.3f}"


def gap_map() -> Iterator[str]:
    """All that the fit prints."""
    losses = law.read()
    published = law.Length("", parameters=360_000_000, tokens_per_step=262_144, steps=27_466)
    target = {**published.factors, "lr": 1e-3}
    yield from filter(str.strip, law.page(losses, [target]).splitlines())
    # Fitted to short runs, the law of AdamW misses the long ones.
    own = [gap for gap in law.gaps_at_best(losses) if (gap.length.optimizer, gap.arm) == ("adamw", "2bw")]
    short = law.fitted([gap for gap in own if gap.length.steps <= 1_200], with_rate=False)
    assert short is not None
    long = sorted((gap for gap in own if gap.length.steps > 1_200), key=lambda gap: gap.length.steps)
    predicted = [f"{short.predict(gap.length.factors)[0]:+.3f}" for gap in long]
    measured = [f"{fmean(gap.differences):+.3f}" for gap in long]
    yield "{}, {} and {} for 4,800 steps (53 and 853 thousand parameters) and 19,200".format(*predicted)
    yield "where {}, {} and {} were measured".format(*measured)
    equal = [gap for gap in law.gaps_at_equal(losses) if (gap.length.optimizer, gap.arm) == ("adamw", "2bw")]
    at_equal = law.fitted(equal, with_rate=True)
    assert at_equal is not None
    at_rates = [at_equal.predict({**published.factors, "lr": lr})[0] for lr in (2.5e-4, 5e-4, 1e-3, 2e-3)]
    yield "{:+.2f}, {:+.2f}, {:+.2f} and {:+.2f} for rates of 2.5e-4, 5e-4, 1e-3 and 2e-3".format(*at_rates)
    yield from _verdicts_on_muon()


def _verdicts_on_muon() -> Iterator[str]:
    """Times of delayed Muon to the loss of the synchronous one, as the page has them."""
    steps, times = _times_of_muon()
    yield f"k = {_ratio(steps, 3)}"
    said = (
        "under `1f1b` with m = p = 8 (r = {:.3f}, measured",
        "against the best synchronous schedule, `zb-v` (r = {:.3f}, simulated)",
        "with m = 4 p under `zb-v` (r = {:.3f}, simulated)",
    )
    for (speed, time), where in zip(times, said, strict=True):
        yield f"{_ratio(time, 3)} {where.format(speed)}"


def readme() -> Iterator[str]:
    """Rows of the README's table of what was measured."""
    yield from boundary.readme()
    _, times = _times_of_muon()
    for (_, ratio), against in zip(times[1:], ("8 micro-batches", "32 micro-batches"), strict=True):
        yield f"| 8 stages, {against}, speeds simulated | {_ratio(ratio, 2)} |"


Ratio = tuple[float, float, float]
"""Middle, and bounds of a 95 % interval."""


def _ratio(ratio: Ratio, digits: int) -> str:
    middle, low, high = (f"{each:.{digits}f}" for each in ratio)
    return f"{middle} ({low} to {high})"


def _times_of_muon() -> tuple[Ratio, list[tuple[float, Ratio]]]:
    """Steps of delayed Muon by the rule of `asyncpp report`, from the page's own table; and ratios of speed,
    with the time that they give."""
    page = (RESULTS / f"{GAP_MAP}.md").read_text(encoding="utf-8").partition("## Time, Muon")[2]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| \d \|", line)]
    delayed_losses = {
        length: {row[0]: float(row[2 + place]) for row in rows}
        for place, length in enumerate((900, 1200, 1600))
    }
    found = steps_ratio(steps=1200, loss={row[0]: float(row[1]) for row in rows}, delayed=delayed_losses)
    assert found.low is not None
    assert found.high is not None
    steps = found.ratio, found.low, found.high
    equal, more = (_simulated_step("zb-v", of) / _simulated_step("2bw", of) for of in (8, 32))
    speeds = fmean(STEP_TIMES), equal, more
    return steps, [(speed, (steps[0] / speed, steps[1] / speed, steps[2] / speed)) for speed in speeds]


def _simulated_step(schedule: str, microbatches: int) -> float:
    """Time of a step on 8 ranks where a rank's forward takes 1 and its backward 2."""
    graph, program = step_graph_of(
        lambda steps: build(schedule, stages=8, microbatches=microbatches, steps=steps)
    )
    return graph.step_time(uniform_costs(program)).seconds


def optimizers_document() -> Iterator[str]:
    """The evidence table of docs/optimizers.md: gap to synchronous AdamW and, of `qhadamw`, to itself."""
    losses = delayed.read()
    uncorrected = {**ADAMW, "schedule": "2bw"}
    for name, arm in {
        "adamw": uncorrected,
        "adamw, error feedback of 1": {**uncorrected, "error_feedback": "1"},
        "adamw, error feedback of 2": {**uncorrected, "optimizer.beta1": "0.95", "error_feedback": "2"},
        "qhadamw (its defaults)": QHADAMW,
    }.items():
        gaps = (_differences(losses, steps, arm, ADAMW) for steps in (4_800, 19_200))
        cells = (f"{_shown(differences)}), {len(differences)} seeds" for differences in gaps)
        yield f"| {name} | {arm['optimizer.beta1']} | {' | '.join(cells)} |"
    yield _gap(losses, 4_800, QHADAMW, {**QHADAMW, "schedule": "1f1b"})
    yield from _muon_beside_adamw()
    at_853k = {line.split(" | ")[0]: line.split(" | ")[3:] for line in own_gaps()}
    for optimizer in ("muon", "adamw, beta1 0.9", "adamw, beta1 0.95"):
        yield at_853k[f"| {optimizer}"][0].split(",")[0]
    of_eight, synchronous = (
        fmean(
            fmean(blocks_of(row))
            for row in _of(rows_of(LONGER_DELAYS), delay=delay, error_feedback=coefficient)
        )
        for delay, coefficient in (("8", "8.0"), ("0", "0.0"))
    )
    yield f"at 8 the gap to `1f1b` is still {of_eight - synchronous:.2f}"


def _muon_beside_adamw() -> Iterator[str]:
    """Synchronous losses, each at its best rate; Muon's is the lower at every size, batch and length."""
    ends: dict[tuple[int, int, int], dict[str, float]] = {}
    for length, arms in law.read().items():
        if "synchronous" in arms:
            of = ends.setdefault((length.parameters, length.tokens_per_step, length.steps), {})
            of[length.optimizer] = fmean(best(arms["synchronous"]).losses.values())
    both = {key: of for key, of in ends.items() if {"adamw", "muon"} <= of.keys()}
    assert all(of["muon"] < of["adamw"] for of in both.values())
    for key in (
        (53_536, 1_024, 1_200),
        (53_536, 1_024, 4_800),
        (853_120, 1_024, 4_800),
        (3_279_104, 1_024, 300),
    ):
        yield f"{both[key]['muon']:.3f} against {both[key]['adamw']:.3f}"


def one_step_delay() -> Iterator[str]:
    """The tables of the experiments at `micro`: headline and batch size; the claims that quote them."""
    for optimizer in ("adamw", "nadamw", "muon", "soap"):
        yield _three_arms(_of(rows_of("one-step-delay-micro-2026-11-21"), optimizer=optimizer), optimizer)
    for optimizer in ("adamw", "muon"):
        for steps in ("1200", "600", "300", "150"):
            own = _of(rows_of("batch-size-2026-11-21"), optimizer=optimizer, steps=steps)
            size = int(own[0]["tokens_per_step"])
            yield _three_arms(own, f"{int(steps):,} x {size:,}")


def _of(rows: Sequence[Row], **settings: str) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in settings.items())]


def _three_arms(rows: Sequence[Row], title: str) -> str:
    """A row of a table: synchronous, delayed, delayed with error feedback; Welch's intervals."""
    [synchronous] = _of(rows, schedule="1f1b")
    cells = [title, _spread(_spread_of(synchronous))]
    gaps = []
    for feedback in ("False", "True"):
        [row] = _of(rows, schedule="2bw", error_feedback=feedback)
        interval = welch(_spread_of(row), _spread_of(synchronous))
        assert interval is not None
        gaps.append((interval.low + interval.high) / 2)
        cells += [_spread(_spread_of(row)), f"{gaps[-1]:+.3f} +- {interval.half_width:.3f}"]
    return " | ".join([*cells, f"{100 * (1 - gaps[1] / gaps[0]):.0f} %"])


def _spread_of(row: Row) -> Spread:
    return Spread(mean=float(row["val_loss"]), std=float(row["val_loss_std"] or "nan"), n=int(row["n"]))


def _spread(sample: Spread) -> str:
    return f"{sample.mean:.3f} +- {sample.std:.3f}"


def deep_pipelines() -> Iterator[str]:
    """Losses and gaps by depth, and paci compared with flushes."""
    depth = rows_of("depth-sweep-2026-11-21")
    for optimizer, correction in (
        *(("adamw", "none"), ("adamw", "lr-discount"), ("nadamw", "none")),
        *(("muon", "none"), ("basis-rotation", "none")),
    ):
        cells = [optimizer if correction == "none" else f"{optimizer}, {correction}"]
        for stages in ("2", "4", "8", "16"):
            own = _of(
                depth, optimizer=optimizer, **{"parallel.stages": stages, "correction.name": correction}
            )
            [delayed] = _of(own, schedule="pipedream")
            synchronous = _of(own, schedule="1f1b")
            cells.append(f"{float(synchronous[0]['val_loss']):.3f}" if synchronous else "")
            cells.append(f"{float(delayed['val_loss']):.3f} ({float(delayed['gap']):+.3f})")
        yield "| " + " | ".join(cells) + " |"
    for microbatches, size in (("4", "8"), ("8", "4"), ("16", "2")):
        own = _of(rows_of("paci-vs-flush-2026-11-21"), **{"schedule.microbatches": microbatches})
        [synchronous], [delayed] = _of(own, schedule="1f1b"), _of(own, schedule="paci")
        half = (float(delayed["gap_high"]) - float(delayed["gap_low"])) / 2
        bound = -(-7 // int(microbatches))  # ceil((p - 1) / a), p = 8
        cells = [f"{microbatches} x {size}", _spread(_spread_of(synchronous)), _spread(_spread_of(delayed))]
        yield "| " + " | ".join([*cells, str(bound), f"{float(delayed['gap']):+.3f} +- {half:.3f}"]) + " |"


def routing() -> Iterator[str]:
    """Gaps of the mixture and the dense model."""
    for row in rows_of("routing-under-delay-2026-11-22"):
        if row["gap"]:
            half = (float(row["gap_high"]) - float(row["gap_low"])) / 2
            yield f"{float(row['gap']):+.3f} ± {half:.3f}"


def experts_beside_dense() -> Iterator[str]:
    for row in rows_of("experts-beside-dense-2026-11-22"):
        yield f"{float(row['val_loss']):.3f} ± {float(row['val_loss_std']):.3f}"


DELAY_OR_BATCH = "delay-or-batch-2026-11-23"


def delay_or_batch() -> Iterator[str]:
    """Losses by rate of the arms whose rates were chosen; the delayed arm minus each synchronous one."""
    chosen = rows_of(f"{DELAY_OR_BATCH}-choice")
    for (optimizer, steps), tried in _tried(chosen, lambda row: (row["optimizer"], int(row["steps"]))):
        yield f"| {optimizer} | {steps} | {tried} |"
    of = rows_of(DELAY_OR_BATCH)
    for optimizer in ("adamw", "muon"):
        arms = {steps: _by_seed(_of(of, optimizer=optimizer, steps=steps)) for steps in EQUAL_TIME}
        for steps, (arm, batch) in EQUAL_TIME.items():
            means = [fmean(losses) for losses in arms[steps].values()]
            row = f"| {optimizer} | {arm} | {batch} | {fmean(means):.4f} | {stdev(means):.4f} |"
            if arm != "2bw":
                found = difference(arms["1200"], arms[steps], comparisons=8)
                assert found.seeds == 6
                row += f" {found} | {_errors(found)} | {found.verdict(bound=BOUND)} |"
            yield row


EQUAL_TIME = {
    "1200": ("2bw", "same"),
    "640": ("1f1b", "same"),
    "417": ("1f1b", "twice"),
    "929": ("zb-v", "same"),
    "600": ("zb-v", "twice"),
}
"""Schedule and batch of the arms of `delay_or_batch`, by their steps."""


BOUND = 0.01
"""Half-width of the equivalence bounds of the preregistered pages, nats per token."""


def _keys(row: Row, *names: str) -> dict[str, str]:
    return {name: row[name] for name in names}


def _errors(found: Difference) -> str:
    return f"{found.of_seeds:.4f} | {found.of_evaluation:.4f}"


def _by_seed(rows: Sequence[Row]) -> Losses:
    return {int(row["seed"]): blocks_of(row) for row in rows}


ArmKey = TypeVar("ArmKey", bound=tuple[Any, ...])


def _by_arm(rows: Sequence[Row], arm_of: Callable[[Row], ArmKey]) -> dict[ArmKey, Losses]:
    """The losses of each arm by seed."""
    arms: dict[ArmKey, dict[int, Sequence[float]]] = {}
    for row in rows:
        arms.setdefault(arm_of(row), {}).update(_by_seed([row]))
    return {**arms}


def _tried(
    rows: Sequence[Row], arm_of: Callable[[Row], ArmKey], *, digits: int = 3
) -> Iterator[tuple[ArmKey, str]]:
    """The rates that were tried in each arm, with their mean losses."""
    rates: dict[ArmKey, dict[float, list[float]]] = {}
    for row in rows:
        of = rates.setdefault(arm_of(row), {})
        of.setdefault(float(row["lr"]), []).append(float(row["val_loss"] or "inf"))
    for arm, losses in sorted(rates.items()):
        yield arm, ", ".join(f"{lr:g}: {fmean(of):.{digits}f}" for lr, of in sorted(losses.items()))


ALL_REDUCE = "delayed-all-reduce-2026-11-23"


def delayed_all_reduce() -> Iterator[str]:
    """Losses by layout and schedule; data ranks minus stages, of the losses under `2bw` and of the gaps."""
    of = {
        (stages, schedule): _by_seed(_of(rows_of(ALL_REDUCE), stages=stages, schedule=schedule))
        for stages in ("4", "1")
        for schedule in ("1f1b", "2bw")
    }
    gaps = {stages: _minus(of[stages, "2bw"], of[stages, "1f1b"]) for stages in ("4", "1")}
    for stages, gap in gaps.items():
        losses = (f"{fmean(map(fmean, of[stages, schedule].values())):.6f}" for schedule in ("1f1b", "2bw"))
        yield f"| {stages} | {' | '.join(losses)} | {fmean(map(fmean, gap.values())):+.6f} |"
    for first, second in ((of["1", "2bw"], of["4", "2bw"]), (gaps["1"], gaps["4"])):
        found = difference(first, second, comparisons=2)
        assert found.seeds == 4
        yield f"| {found} | {_errors(found)} | {found.verdict(bound=BOUND)} |"
    most = max(
        abs(fmean(of["1", schedule][seed]) - fmean(of["4", schedule][seed]))
        for schedule in ("1f1b", "2bw")
        for seed in of["1", schedule]
    )
    yield f"at most {most:.6f} nats per token in any of the 8 pairs"


LONGER_DELAYS = "longer-delays-2026-11-24"


def longer_delays() -> Iterator[str]:
    """Losses by rate of each arm; the primary comparisons, and the share of the gap that is closed."""

    def arm_of(row: Row) -> tuple[str, str]:
        return row["delay"], _correction(row)

    for (delay, correction), tried in _tried(rows_of(f"{LONGER_DELAYS}-choice"), arm_of):
        yield f"| {delay} | {correction} | {tried} |"
    arms = _by_arm(rows_of(LONGER_DELAYS), arm_of)
    for (delay, correction), of in sorted(arms.items()):
        means = [fmean(losses) for losses in of.values()]
        line = f"| {delay} | {correction} | {fmean(means):.4f} | {stdev(means):.4f} |"
        if delay == "0":
            line += " | | | |"
        else:
            against = ("0", "none") if correction == "none" else (delay, "none")
            found = difference(of, arms[against], comparisons=12)
            assert found.seeds == 6
            line += f" {found} | {_errors(found)} | {found.verdict(bound=BOUND)} |"
        yield line
        if correction != "none":
            sync, plain = (fmean(map(fmean, arms[arm].values())) for arm in (("0", "none"), (delay, "none")))
            closed = (plain - fmean(means)) / (plain - sync)
            yield f"{correction} closes {closed:.0%} of the gap at a delay of {delay}"


def _correction(row: Row) -> str:
    if float(row["error_feedback"] or 0):
        return "error feedback"
    return row["correction"].replace("-", " ") or "none"


MOMENTUM = "momentum-under-delay-2026-11-25"


def momentum() -> Iterator[str]:
    """Losses by rate of each arm, gaps by momentum, and what another momentum than the default changes."""
    for optimizer, key, default in (("muon", "momentum", "0.95"), ("adamw", "beta1", "0.9")):

        def arm_of(row: Row, key: str = key, default: str = default) -> tuple[str, str]:
            return row[key] or default, row["schedule"]

        arms = _by_arm(_of(rows_of(MOMENTUM), optimizer=optimizer), arm_of)
        values = sorted({value for value, _ in arms})
        gaps = {value: _minus(arms[value, "2bw"], arms[value, "1f1b"]) for value in values}
        chosen = _of(rows_of(f"{MOMENTUM}-choice"), optimizer=optimizer)
        for (value, schedule), tried in _tried(chosen, arm_of):
            yield f"| {optimizer} | {value} | {schedule} | {tried} |"
        for value in values:
            losses = [fmean(map(fmean, arms[value, schedule].values())) for schedule in ("1f1b", "2bw")]
            gap = difference(arms[value, "2bw"], arms[value, "1f1b"], comparisons=20)
            assert gap.seeds == 5
            line = f"| {optimizer} | {value} | {losses[0]:.4f} | {losses[1]:.4f} "
            line += f"| {gap}, {gap.verdict(bound=BOUND)} |"
            for first, second in (
                (gaps[value], gaps[default]),
                (arms[value, "2bw"], arms[default, "2bw"]),
            ):
                found = difference(first, second, comparisons=20)
                line += " |" if value == default else f" {found}, {found.verdict(bound=BOUND)} |"
            yield line


OWN_GAP = "own-gap-2026-11-25"


def own_gaps() -> Iterator[str]:
    """Losses by rate of arms whose rates were chosen; losses, own gaps, and gaps to synchronous arms."""

    def arm_of(row: Row) -> tuple[str, str, str]:
        return row["optimizer"], row["beta1"], row["schedule"]

    for (optimizer, beta1, schedule), tried in _tried(rows_of(f"{OWN_GAP}-choice"), arm_of, digits=4):
        yield f"| {_with_beta1(optimizer, beta1)} | `{schedule}` | {tried} |"
    arms = _by_arm(rows_of(OWN_GAP), arm_of)
    adamw, muon = (
        next(losses for arm, losses in arms.items() if (arm[0], arm[2]) == (name, "1f1b"))
        for name in ("adamw", "muon")
    )
    for optimizer, beta1 in sorted({arm[:2] for arm in arms}):
        alone, delayed_ones = (arms[optimizer, beta1, schedule] for schedule in ("1f1b", "2bw"))
        gap = difference(delayed_ones, alone, comparisons=4)
        assert gap.seeds == 4
        if gap.verdict(bound=BOUND) == "undecided":
            by_seed = (fmean(delayed_ones[seed]) - fmean(alone[seed]) for seed in sorted(alone))
            yield f"The four seeds differ: {', '.join(f'{one:+.4f}' for one in by_seed)}."
        means = " | ".join(f"{fmean(map(fmean, of.values())):.4f}" for of in (alone, delayed_ones))
        others = " | ".join(str(difference(delayed_ones, other, comparisons=4)) for other in (adamw, muon))
        yield f"| {_with_beta1(optimizer, beta1)} | {means} | {gap}, {gap.verdict(bound=BOUND)} | {others} |"


def _with_beta1(optimizer: str, beta1: str) -> str:
    return f"adamw, beta1 {beta1 or 0.9}" if optimizer == "adamw" else optimizer


HEAD_IN_SHARDS = "head-in-shards-2026-11-25"


def head_in_shards() -> Iterator[str]:
    """Tokens per second by seed and their ratio; shares of time that ranks compute."""
    rows = rows_of(HEAD_IN_SHARDS)
    ratios = []
    for seed in sorted({row["seed"] for row in rows}):
        whole, shards = (
            float(_of(rows, seed=seed, shard_head=of)[0]["tokens_per_second"]) for of in ("False", "True")
        )
        ratios.append(shards / whole)
        yield f"| {seed} | {whole:,.0f} | {shards:,.0f} | {ratios[-1]:.2f} |"
    # Of two blocks and one block with a head of three, the slower has four of six parts.
    yield f"{fmean(ratios):.2f} times as fast, where the multiply-adds promise {4 / 3:.2f}"
    for row in rows_of(f"{HEAD_IN_SHARDS}-emulated"):
        yield f"| {row['arm'].removeprefix('busy_').replace('_', ' ')} | {float(row['busy']):.3f} |"


SLOW_LINK = "slow-link-2026-11-25"


def slow_link() -> Iterator[str]:
    """Time per step by rate of the link, and the ratio of the arms: median, lowest and highest round."""
    for when, name in (("at once", SLOW_LINK), ("before", "slow-link-2026-11-24")):
        rows = rows_of(name)
        for rate in dict.fromkeys(row["mbit"] for row in rows):
            of_rate = _of(rows, mbit=rate)
            synchronous, delayed = (
                [float(row[f"seconds_{arm}"]) for row in of_rate] for arm in ("1f1b", "2bw")
            )
            ratios = [first / second for first, second in zip(synchronous, delayed, strict=True)]
            yield (
                f"| {when} | {float(rate):g} | {1e3 * median(synchronous):,.0f} "
                f"| {1e3 * median(delayed):,.0f} "
                f"| {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) "
                f"| {float(of_rate[0]['planned']):.2f} |"
            )


def _minus(first: Losses, second: Losses) -> Losses:
    """Differences by seed and block."""
    return {
        seed: [a - b for a, b in zip(blocks, second[seed], strict=True)] for seed, blocks in first.items()
    }


REHEARSED = "rehearsed-ranks-2026-11-24"
REHEARSED_COMPILED = "rehearsed-compiled-ranks-2026-11-25"


def rehearsed_ranks() -> Iterator[str]:
    """Peak memory of each run's ranks and its difference from the plan; what the text says of all of them."""
    rows = rows_of(REHEARSED)
    yield from _peaks(rows)
    seconds = [float(row["core_seconds"]) for row in rows]
    memory = max(int(row["process_bytes"]) for row in rows)
    yield f"{min(seconds):.0f} to {max(seconds):.0f} s of one core"
    yield f"the process at most {memory / 1e9:.2f} GB"
    flops = [float(row["found_flops"]) / float(row["planned_flops"]) for row in rows]
    yield f"{100 * (min(flops) - 1):.1f} to {100 * (max(flops) - 1):.1f} % more FLOPs"
    for model, schedule, rank in (("1b-7b-moe", "2bw-v+split", "7"), ("1b-7b-moe", "1f1b", "6")):
        (row,) = _of(rows, model=model, schedule=schedule, rank=rank)
        for kind in ("activations", "messages", "other", "temporary"):
            found, planned = (int(row[f"{of}_{kind}"] or 0) / 1e9 for of in ("found", "planned"))
            yield f"| {kind} | {found:.3f} | {planned:.3f} | {found - planned:+.3f} |"


def rehearsed_compiled_ranks() -> Iterator[str]:
    """Likewise with compiled blocks, and what makes the largest difference."""
    rows = rows_of(REHEARSED_COMPILED)
    yield from _peaks(rows)
    worst = max(rows, key=lambda row: abs(_beyond_plan(row)))
    yield f"`{worst['model']}`, `{worst['schedule']}`, rank {worst['rank']}"
    for kind in ("activations", "temporary", "messages"):
        found, planned = (int(worst[f"{of}_{kind}"] or 0) / 1e9 for of in ("found", "planned"))
        yield f"| {kind} | {found:.2f} | {planned:.2f} | {found - planned:+.2f} |"
    more = [row for row in rows if _beyond_plan(row) > 0]
    yield f"{len(more)} ranks take more than planned, by at most {100 * max(map(_beyond_plan, rows)):.1f} %"


H100 = "h100-2026-11-26"


def h100() -> Iterator[str]:
    """Speed of each stage, and its memory where that was measured in a process of its own."""
    for row in rows_of(H100):
        where = f"{row['stage']} | {row['schedule']}"
        graphs = ", CUDA graphs, not compiled" * (row["cuda_graphs"] == "yes")
        speed = f"{float(row['tokens_per_second']):,.0f} | {100 * float(row['mfu']):.1f} %"
        tokens = f"{int(row['microbatch_tokens']):,}"
        yield f"| {row['model']}{graphs} | {where} | {row['recompute']} | {tokens} | {speed} |"
        if row["memory_gb"]:
            found, planned = float(row["memory_gb"]), float(row["planned_gb"])
            sizes = f"{found:.2f} GB | {planned:.2f} GB | {planned / found:.2f}"
            yield f"| {row['model']} | {where} | {sizes} |"


def _peaks(rows: Sequence[Row]) -> Iterator[str]:
    runs = list(dict.fromkeys((row["model"], row["schedule"]) for row in rows))
    for model, schedule in runs:
        ranks = {int(row["rank"]): row for row in _of(rows, model=model, schedule=schedule)}
        assert sorted(ranks) == list(range(8))
        shown = (
            f"{int(ranks[rank]['found_bytes']) / 1e9:.2f} ({100 * _beyond_plan(ranks[rank]):+.1f} %)"
            for rank in (0, 3, 7)
        )
        worst = max((_beyond_plan(row) for row in ranks.values()), key=abs)
        yield f"| {model} | {schedule} | {' | '.join(shown)} | {100 * worst:+.1f} % |"
    beyond = [100 * _beyond_plan(row) for row in rows]
    assert not any(int(row["faults"]) or int(row["waits"]) for row in rows)
    yield f"All {len(rows)} ranks are between {min(beyond):+.1f} and {max(beyond):+.1f} % of the plan"


def _beyond_plan(row: Row) -> float:
    return int(row["found_bytes"]) / int(row["planned_bytes"]) - 1


RATES_OVER_WIDTH = "rates-over-width-2026-11-25"


def rates_over_width() -> Iterator[str]:
    """Losses by rate, best rates by width, and the best delayed rate over the best synchronous one."""
    rows = rows_of(RATES_OVER_WIDTH)
    grid = sorted({float(row["lr"]) for row in rows})
    for optimizer, parametrization in (("muon", "mup"), ("adamw", "mup"), ("muon", "standard")):
        arms = _of(rows, optimizer=optimizer, parametrization=parametrization)
        widths = sorted({row["width"] for row in arms}, key=int)
        best: dict[tuple[str, str], float | None] = {}
        for schedule, width in product(("1f1b", "2bw"), widths):
            found: list[float | None] = []
            for seed in sorted({row["seed"] for row in arms}):
                of = _of(arms, schedule=schedule, width=width, seed=seed)
                losses = {float(row["lr"]): float(row["val_loss"]) for row in of}
                found.append(_vertex(losses))
                shown = " | ".join(f"{losses[lr]:.3f}" if lr in losses else "" for lr in grid)
                name = f"{optimizer}, {parametrization} | {schedule} | {width} | {seed}"
                yield f"| {name} | {shown} | {_rate(found[-1])} |"
            inside = [rate for rate in found if rate is not None]
            best[schedule, width] = geometric_mean(inside) if len(inside) == len(found) else None
        for width in widths:
            synchronous, delayed = best["1f1b", width], best["2bw", width]
            ratio = "" if synchronous is None or delayed is None else f"{delayed / synchronous:.2f}"
            rates = f"{_rate(synchronous)} | {_rate(delayed)} | {ratio}"
            yield f"| {optimizer}, {parametrization} | {width} | {rates} |"


def _rate(rate: float | None) -> str:
    return "edge" if rate is None else f"{rate:.1e}"


def _vertex(losses: Mapping[float, float]) -> float | None:
    """Where the parabola through the lowest loss and its neighbours has its minimum, over the logarithm of
    the rate; None where the lowest is at an edge. Rates are a factor of 2 apart."""
    rates = sorted(losses)
    lowest = rates.index(min(losses, key=lambda rate: losses[rate]))
    if lowest in (0, len(rates) - 1):
        return None
    left, middle, right = (losses[rate] for rate in rates[lowest - 1 : lowest + 2])
    return float(rates[lowest] * 2 ** ((left - right) / (2 * (left - 2 * middle + right))))


PAGES: Mapping[str, Callable[[], Iterator[str]]] = {
    f"benchmarks/results/{boundary.NAME}.md": boundary.page,
    f"benchmarks/results/{fsdp_arm.NAME}.md": fsdp_arm.page,
    f"benchmarks/results/{DELAYED_ADAMW}.md": delayed_adamw,
    f"benchmarks/results/{GAP_MAP}.md": gap_map,
    "benchmarks/results/one-step-delay-2026-11-21.md": one_step_delay,
    "benchmarks/results/deep-pipelines-2026-11-21.md": deep_pipelines,
    "benchmarks/results/routing-under-delay-2026-11-22.md": routing,
    "benchmarks/results/experts-beside-dense-2026-11-22.md": experts_beside_dense,
    f"benchmarks/results/{DELAY_OR_BATCH}.md": delay_or_batch,
    f"benchmarks/results/{ALL_REDUCE}.md": delayed_all_reduce,
    f"benchmarks/results/{LONGER_DELAYS}.md": longer_delays,
    f"benchmarks/results/{MOMENTUM}.md": momentum,
    f"benchmarks/results/{OWN_GAP}.md": own_gaps,
    f"benchmarks/results/{HEAD_IN_SHARDS}.md": head_in_shards,
    f"benchmarks/results/{SLOW_LINK}.md": slow_link,
    f"benchmarks/results/{REHEARSED}.md": rehearsed_ranks,
    f"benchmarks/results/{REHEARSED_COMPILED}.md": rehearsed_compiled_ranks,
    f"benchmarks/results/{RATES_OVER_WIDTH}.md": rates_over_width,
    f"benchmarks/results/{H100}.md": h100,
    "docs/optimizers.md": optimizers_document,
    "README.md": readme,
}
"""By document: the text that its raw files say it should contain."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the index into results/README.md")
    wrong = pages.faults(write=parser.parse_args().write)
    for name, lines in PAGES.items():
        wrong += [f"{name}: its raw file says: {line}" for line in missing(ROOT / name, lines())]
    print(*wrong, sep="\n", end="\n" * bool(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
