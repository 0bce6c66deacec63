"""The answer in words: what the delay costs, what a correction recovers, what the schedule wins."""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncpp_cli.report.cells import FEW_SEEDS, Cell
from asyncpp_cli.report.names import arm_names, value_text
from asyncpp_cli.report.statistics import CONFIDENCE

TOKENS_PER_PARAMETER = 20
"""Tokens a parameter that pretraining usually takes; runs below it are called short."""

MAX_GROUPS = 4
"""Models or other variations that are put into words one by one; beyond that the gap column does better."""


MAX_NAMED = 6
"""Cells that a sentence names."""


def in_words(cells: Sequence[Cell]) -> list[str]:
    """Sentences that answer, from the cells alone, what a reader of the table wants to know."""
    delayed = [cell for cell in cells if cell.baseline is not None and not cell.synchronous]
    if not delayed:
        return []
    return [
        *_loss_sentences(delayed),
        *_speed_sentences(delayed),
        *_target_sentences(delayed),
        *_more_updates(delayed),
        *_unpaired(cells, delayed),
        *_certainty(cells, delayed),
        *_caveats(delayed),
    ]


def _loss_sentences(delayed: Sequence[Cell]) -> list[str]:
    compared = [cell for cell in delayed if cell.gap is not None and math.isfinite(cell.gap)]
    groups: dict[tuple[str, ...], list[Cell]] = {}
    models = len({cell.model for cell in compared}) > 1
    for cell in compared:
        where = [f"{name}={value}" for name, value in _where(cell).items()]
        groups.setdefault((cell.schedule, *([cell.model] if models else []), *where), []).append(cell)
    if len(groups) > MAX_GROUPS:
        return _along_one_axis(compared) or [
            f"Loss: {len(compared)} comparisons with a synchronous cell; see the gap column."
        ]
    sentences = []
    for (schedule, *where), group in groups.items():
        baseline = group[0].baseline
        assert baseline is not None
        prefix = f"Loss ({', '.join(where)})" if where and len(groups) > 1 else "Loss"
        optimizers = dict.fromkeys(cell.optimizer for cell in group)
        changes = [_of_optimizer([cell for cell in group if cell.optimizer == name]) for name in optimizers]
        sentences.append(
            f"{prefix}: against {baseline.schedule}, {schedule} changes the validation loss "
            f"{'; '.join(changes)} nats a token."
        )
    return sentences


def _where(cell: Cell) -> dict[str, str]:
    """What tells the cell from others beside schedule, optimizer, correction and model."""
    return {
        name: value_text(value)
        for name, value in cell.axes.items()
        if name not in cell.chosen and not name.startswith("correction.") and cell.uses(name)
    }


def _along_one_axis(compared: Sequence[Cell]) -> list[str]:
    """The gaps along the one axis that the cells differ in, beside optimizer and correction; else nothing."""
    places = [_where(cell) | {"model": cell.model} for cell in compared]
    varying = [name for name in places[0] if len({place.get(name) for place in places}) > 1]
    if len(varying) != 1 or len({cell.schedule for cell in compared}) > 1:
        return []
    (axis,) = varying
    values = list(dict.fromkeys(place[axis] for place in places))
    gaps: dict[str, dict[str, float]] = {}
    for cell, place in zip(compared, places, strict=True):
        arm = " with ".join(filter(None, (cell.optimizer, _correction(cell))))
        gaps.setdefault(arm, {})[place[axis]] = cell.gap or 0.0
    said = "; ".join(
        f"of {arm} by {', '.join(_number(found.get(value)) for value in values)}"
        for arm, found in gaps.items()
    )
    baseline = compared[0].baseline
    assert baseline is not None
    return [
        f"Loss: against {baseline.schedule}, at {axis} = {', '.join(values)}, {compared[0].schedule} changes "
        f"the validation loss {said} nats a token."
    ]


def _number(gap: float | None) -> str:
    return "?" if gap is None else f"{gap:+.3f}"


def _correction(cell: Cell) -> str:
    """The cell's corrections and their settings, as far as cells differ in them; empty without one."""
    parts = []
    if cell.error_feedback:
        strength = "" if cell.error_feedback == 1 else f" (c = {cell.error_feedback:g})"
        parts.append(f"error feedback{strength}")
    if cell.correction is not None:
        settings = [
            f"{name.partition('.')[2]} {value_text(value)}"
            for name, value in cell.axes.items()
            if name.startswith("correction.") and name not in ("correction.name", *cell.chosen)
        ]
        parts.append(f"{cell.correction} ({', '.join(settings)})" if settings else cell.correction)
    return " and ".join(parts)


def _of_optimizer(cells: Sequence[Cell]) -> str:
    """One optimizer's gaps: plain, then with each correction and the share of the gap that it recovers."""
    parts = [f"by {cell.gap:+.3f}{_updates(cell)}" for cell in cells if not cell.corrected]
    for cell in cells:
        if not cell.corrected:
            continue
        share = ""
        if cell.recovered is not None:
            share = (
                f" ({cell.recovered:.0%} of the gap recovered)" if cell.recovered >= 0 else " (a wider gap)"
            )
        parts.append(f"with {_correction(cell)} by {cell.gap:+.3f}{_updates(cell)}{share}")
    return f"of {cells[0].optimizer} {', '.join(parts)}"


def _updates(cell: Cell) -> str:
    """What makes the gap no price of the delay alone."""
    ratio = cell.update_ratio
    return "" if ratio in (None, 1.0) else f" with {ratio:g} times the updates"


def _speed_sentences(delayed: Sequence[Cell]) -> list[str]:
    sentences = []
    for schedule in dict.fromkeys(cell.schedule for cell in delayed):
        cells = [cell for cell in delayed if cell.schedule == schedule and cell.throughput_ratio is not None]
        if not cells:
            continue
        baseline = cells[0].baseline
        assert baseline is not None
        ratios = _range(
            [cell.throughput_ratio for cell in cells if cell.throughput_ratio is not None], "{:.2f}"
        )
        sentence = (
            f"Speed: {schedule} trains on {ratios} times as many tokens a second as {baseline.schedule}"
        )
        mine = [cell.bubble.mean for cell in cells if cell.bubble is not None]
        theirs = [cell.baseline.bubble.mean for cell in cells if cell.baseline and cell.baseline.bubble]
        if mine and theirs:
            sentence += (
                f"; its ranks wait {_range(mine, '{:.0%}')} of the time instead of {_range(theirs, '{:.0%}')}"
            )
        sentences.append(f"{sentence}.")
    return sentences


def _range(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def _target_sentences(delayed: Sequence[Cell]) -> list[str]:
    ratios = [cell.time_to_target_ratio for cell in delayed if cell.time_to_target_ratio is not None]
    target = delayed[0].target
    if not ratios or target is None:
        return []
    return [
        f"Time: to a validation loss of {target:g} the delayed cells train {_range(ratios, '{:.2f}')} times "
        "as fast as the synchronous ones."
    ]


def _more_updates(delayed: Sequence[Cell]) -> list[str]:
    """Where a gap compares runs that differ in more than the delay."""
    sentences = []
    for schedule in dict.fromkeys(cell.schedule for cell in delayed):
        ratios = {cell.update_ratio for cell in delayed if cell.schedule == schedule and cell.gap is not None}
        if other := sorted(ratio for ratio in ratios if ratio not in (None, 1.0)):
            sentences.append(
                f"Not like with like: on the same tokens {schedule} makes {_range(other, '{:g}')} times the "
                "updates of its synchronous counterpart; its gap holds that gain, too."
            )
    return sentences


def _unpaired(cells: Sequence[Cell], delayed: Sequence[Cell]) -> list[str]:
    """Seeds that one arm of a gap has and the other lacks."""
    names = dict(zip(map(id, cells), arm_names(cells), strict=True))
    left_out = [
        f"{names[id(cell)]} without seed {', '.join(map(str, cell.gap_pairs.unpaired))}"
        + ("" if cell.gap_pairs.seeds else " and so without a gap")
        for cell in delayed
        if cell.gap_pairs is not None and cell.gap_pairs.unpaired
    ]
    if not left_out:
        return []
    more = f"; and {len(left_out) - MAX_NAMED} more" if len(left_out) > MAX_NAMED else ""
    return [f"Gaps are over the seeds that both arms have: {'; '.join(left_out[:MAX_NAMED])}{more}."]


def _certainty(cells: Sequence[Cell], delayed: Sequence[Cell]) -> list[str]:
    """What the intervals mean, and which gaps cannot be told from none."""
    with_interval = [cell for cell in delayed if cell.gap_interval is not None]
    if not with_interval:
        return []
    said = (
        f"The gap's ± is the half-width of its {CONFIDENCE:.0%} interval, from the differences between runs "
        "of one seed, which start alike and see the same data."
    )
    names = dict(zip(map(id, cells), arm_names(cells), strict=True))
    unclear = [
        names[id(cell)] for cell in with_interval if cell.gap_interval and cell.gap_interval.holds_zero
    ]
    if not unclear:
        return [said]
    named = "; ".join(unclear[:MAX_NAMED])
    more = f"; and {len(unclear) - MAX_NAMED} more" if len(unclear) > MAX_NAMED else ""
    return [said, f"Not told apart from a gap of zero: {named}{more}."]


def _caveats(delayed: Sequence[Cell]) -> list[str]:
    compared = [cell for cell in delayed if cell.gap is not None]
    if not compared:
        return []
    sentences = []
    fewest = min(len(cell.gap_pairs.seeds) for cell in compared if cell.gap_pairs is not None)
    if fewest < FEW_SEEDS:
        seeds = "one seed" if fewest == 1 else f"{fewest} seeds"
        sentences.append(f"How sure: some gaps rest on {seeds} (n = {fewest}): a small one may be chance.")
    short = [tokens for tokens in (_tokens_per_parameter(cell) for cell in compared) if tokens is not None]
    if short and min(short) < TOKENS_PER_PARAMETER:
        sentences.append(
            f"A short run ({min(short):.2g} tokens a parameter; {TOKENS_PER_PARAMETER} are usual) spends "
            "most of its steps at a high learning rate and exaggerates gaps."
        )
    return sentences


def _tokens_per_parameter(cell: Cell) -> float | None:
    for run in cell.runs:
        start = run.measurement.start
        parameters, tokens = (start or {}).get("parameters"), (start or {}).get("tokens_per_step")
        if isinstance(parameters, int) and isinstance(tokens, int | float) and parameters > 0:
            return float(run.measurement.steps_done * tokens / parameters)
    return None
