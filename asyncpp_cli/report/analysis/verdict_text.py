"""A verdict in sentences, and as a record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncpp_cli.report.analysis.cells import FEW_SEEDS, CellResult
from asyncpp_cli.report.analysis.conditions import busy_text
from asyncpp_cli.report.analysis.further_runs import (
    further_seeds,
    further_setting,
    how_to_train,
    in_further_lengths,
    sweep_and_launch,
)
from asyncpp_cli.report.analysis.statistics import MOST_FACTOR, Interval
from asyncpp_cli.report.analysis.steps_to_loss import StepsRatio
from asyncpp_cli.report.analysis.verdict import MOST_SEEDS, UNDECIDED, Speed, Verdict

_MOST_SENTENCES = 4

_NO_SYNCHRONOUS_ARM = (
    "No verdict: no synchronous arm of the same model, data, tokens per step and number of ranks has a loss."
)
_CHOSEN_ON_THE_SAME_SEEDS = (
    "The best settings were chosen on the seeds that are compared, so the intervals are too narrow: choose "
    "them on other seeds (asyncpp tune)."
)


def verdict_lines(cells: Sequence[CellResult], found: Sequence[Verdict]) -> tuple[list[str], list[str]]:
    """The verdicts that have a time, in sentences; and if none has, why, with what would answer it."""
    timed = [verdict for verdict in found if verdict.time is not None]
    if timed:
        chosen = [_CHOSEN_ON_THE_SAME_SEEDS] if any(cell.chosen for cell in cells) else []
        return [sentence(verdict) for verdict in timed[:_MOST_SENTENCES]] + chosen, []
    if not found and any(not cell.synchronous and cell.losses for cell in cells):
        return [], [_NO_SYNCHRONOUS_ARM]
    # The arms that were run for it.
    several = [verdict for verdict in found if len({cell.sequences for cell in verdict.lengths}) > 1]
    if found and not several and not found[0].unfinished:
        return [], [f"{sentence(found[0])} {in_further_lengths(found[0])}"]
    return [], [sentence(verdict) for verdict in (several or found[:1])[:_MOST_SENTENCES]]


def sentence(verdict: Verdict) -> str:
    """The verdict in one sentence; if the runs cannot tell, a second one says what would decide."""
    reaches = (
        f"{verdict.delayed.arm} reaches the loss of {verdict.synchronous.arm} "
        f"({verdict.synchronous.steps:,} steps)"
    )
    if verdict.steps is None or verdict.speed is None or verdict.fastest is None:
        setting = further_setting(verdict)
        more = "" if setting is None and not verdict.unfinished else f" {how_to_train(verdict, setting)}"
        return f"Not answered: whether {reaches} sooner: {verdict.reason}.{more}"
    ends = " to ".join(
        "?" if end is None else f"{end:.2f}" for end in (verdict.steps.low, verdict.steps.high)
    )
    among = f" (over {', '.join(verdict.compared)} as measured here)" if verdict.compared else ""
    text = (
        f"{reaches} in {verdict.time:.2f}{_bounds(verdict)} of the time of the fastest synchronous schedule "
        f"that was run, {verdict.fastest.schedule}{among}: {verdict.steps.ratio:.2f} ({ends}) times the "
        f"tokens, {verdict.speed.ratio:.2f} times as many per second; {len(verdict.steps.seeds)} seeds"
    )
    if busy := busy_text([*verdict.timed, verdict.fastest]):
        text = f"{text}. {busy}"
    if verdict.answer != UNDECIDED:
        return f"{verdict.answer.capitalize()}: {text}."
    return f"The runs cannot tell: {text}. {_what_would_decide(verdict, verdict.steps, verdict.speed)}"


def _bounds(verdict: Verdict) -> str:
    """The interval of the time, in brackets; empty if it is open."""
    if verdict.interval is None:
        return ""
    low, high = verdict.interval
    if Interval(low=low, high=high).says_nothing:
        return f" (its interval spans more than a factor of {MOST_FACTOR:g})"
    return f" ({low:.2f} to {high:.2f})"


def _what_would_decide(verdict: Verdict, steps: StepsRatio, speed: Speed) -> str:
    """The runs that are missing for a verdict with a time, with the commands that train them."""
    setting = further_setting(verdict)
    if verdict.unfinished:
        return f"{verdict.unfinished:,} of the runs are not complete: {how_to_train(verdict, setting)}"
    if setting is not None:
        why = "The losses between the lengths are not known well enough"
        if len(steps.seeds) < FEW_SEEDS:
            why = "Two seeds say little"
        elif steps.low is None or steps.high is None:
            why = "The interval reaches beyond the lengths of the runs"
        return f"{why}: {how_to_train(verdict, setting)}"
    if speed.logarithm is None:
        return "The speed has fewer than two pairs of runs with one seed: measure that of more seeds."
    seeds = verdict.seeds_to_decide
    if seeds is None:
        return f"The time is about the same: {MOST_SEEDS} seeds would not decide."
    more = sweep_and_launch(verdict, further_seeds(verdict, seeds))
    return f"About {seeds} seeds would decide, if the spread stays: {more}"


def record_of(verdict: Verdict) -> dict[str, Any]:
    """The verdict's sentence and numbers, for JSON."""
    steps = verdict.steps
    return {
        "answer": verdict.answer,
        "sentence": sentence(verdict),
        "time_ratio": verdict.time,
        "time_interval": list(verdict.interval) if verdict.interval else None,
        "steps_ratio": steps.ratio if steps else None,
        "steps_by_curve": list(steps.by_curve) if steps else None,
        "steps_interval": [steps.low, steps.high] if steps else None,
        "speed_ratio": verdict.speed.ratio if verdict.speed else None,
        "synchronous": verdict.synchronous.arm,
        "synchronous_steps": verdict.synchronous.steps,
        "fastest_synchronous": verdict.fastest.schedule if verdict.fastest else None,
        "seeds_to_decide": verdict.seeds_to_decide if verdict.answer == UNDECIDED else None,
    }
