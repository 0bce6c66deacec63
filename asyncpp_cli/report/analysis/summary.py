"""The results in sentences: the cost of delay, what corrections recover, the gain in throughput, and what the
ranks wait for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from asyncpp_cli.base.console import command
from asyncpp_cli.report.analysis.cells import FEW_SEEDS, CellResult, value_text
from asyncpp_cli.report.analysis.conditions import busy_text, span
from asyncpp_cli.report.analysis.further_runs import seeds_setting
from asyncpp_cli.report.analysis.statistics import CONFIDENCE, MOST_FACTOR
from asyncpp_cli.report.load.run import grouped
from asyncpp_cli.runs.experiment_folder import whole_template

TOKENS_PER_PARAMETER = 20
"""Usual tokens per parameter of pretraining; runs with fewer are called short."""

MAX_GROUPS = 4
"""Most variations that get a sentence each."""

MAX_VALUES = 8
"""Gaps that a sentence lists; of more it gives the range of each arm."""

UNEVEN = 1.1
"""Time of the slowest rank over the mean, or of a process over its peers, that is worth a sentence."""

MAX_NAMED = 6
"""Cells that a sentence names."""


def summary_lines(cells: Sequence[CellResult]) -> list[str]:
    """The results of the delayed cells in sentences; empty without a synchronous counterpart."""
    delayed = [cell for cell in cells if cell.baseline is not None and not cell.synchronous]
    if not delayed:
        return [*_shared_losses(cells), *_slowest_sentences(cells), *_diverged(cells)]
    return [
        *_shared_losses(cells),
        *_loss_sentences(delayed),
        *_speed_sentences(delayed),
        *_slowest_sentences(cells),
        *_target_sentences(delayed),
        *_more_updates(delayed),
        *_diverged(cells),
        *_unpaired(delayed),
        *_certainty(delayed),
        *_caveats(delayed),
    ]


def _shared_losses(cells: Sequence[CellResult]) -> list[str]:
    """The synchronous schedules that ran for their speed alone, and whose loss is theirs, too."""
    steps_of: dict[str, dict[str, set[int]]] = {}
    for cell in cells:
        if cell.speed_only:
            giver = cell.loss_of.schedule if cell.loss_of is not None else "a schedule that is not here"
            by_schedule = steps_of.setdefault(giver, {})
            by_schedule.setdefault(cell.schedule, set()).add(cell.steps)
    return [
        f"Loss of {giver}; "
        + "; ".join(
            f"{schedule} ran {' or '.join(f'{count:,}' for count in sorted(steps))} steps for its speed"
            for schedule, steps in by_schedule.items()
        )
        + ": synchronous layouts with the same numbers."
        for giver, by_schedule in steps_of.items()
    ]


def _loss_sentences(delayed: Sequence[CellResult]) -> list[str]:
    compared = [cell for cell in delayed if cell.gap is not None and math.isfinite(cell.gap)]
    groups: dict[tuple[str, ...], list[CellResult]] = {}
    models = len({cell.model for cell in compared}) > 1
    for cell in compared:
        where = [f"{name}={value}" for name, value in _position(cell).items()]
        assert cell.baseline is not None
        arms = (cell.schedule, cell.baseline.schedule)
        groups.setdefault((*arms, *([cell.model] if models else []), *where), []).append(cell)
    if len(groups) > MAX_GROUPS:
        return _along_one_axis(compared) or [
            f"Loss: {len(compared)} comparisons with a synchronous cell; see the gap column."
        ]
    sentences = []
    for (schedule, baseline, *where), group in groups.items():
        prefix = f"Loss ({', '.join(where)})" if where and len(groups) > 1 else "Loss"
        optimizers = dict.fromkeys(cell.optimizer for cell in group)
        changes = [
            _optimizer_changes([cell for cell in group if cell.optimizer == name]) for name in optimizers
        ]
        sentences.append(
            f"{prefix}: against {baseline}, {schedule} changes the validation loss (nats per token) "
            f"{'; '.join(changes)}."
        )
    return sentences


def _position(cell: CellResult) -> dict[str, str]:
    """The cell's values of keys other than schedule, optimizer, correction and model."""
    return {
        name: value_text(value)
        for name, value in cell.axes.items()
        if name not in cell.chosen and not name.startswith("correction.") and cell.uses(name)
    }


def _along_one_axis(compared: Sequence[CellResult]) -> list[str]:
    """The gaps along the only axis other than optimizer and correction in which the cells differ, if any."""
    positions = [_position(cell) | {"model": cell.model} for cell in compared]
    names = dict.fromkeys(name for position in positions for name in position)
    varying = [name for name in names if len({position.get(name) for position in positions}) > 1]
    arms = {(cell.schedule, cell.baseline and cell.baseline.schedule) for cell in compared}
    if len(varying) != 1 or len(arms) > 1:
        return []
    (axis,) = varying
    values = list(dict.fromkeys(position[axis] for position in positions))
    gaps: dict[str, dict[str, float]] = {}
    for cell, position in zip(compared, positions, strict=True):
        arm = " with ".join(filter(None, (cell.optimizer, _correction(cell))))
        gaps.setdefault(arm, {})[position[axis]] = cell.gap or 0.0
    baseline = compared[0].baseline
    assert baseline is not None
    if len(values) * len(gaps) > MAX_VALUES:
        changes = "; ".join(f"of {arm} by {_extremes(by_value, axis)}" for arm, by_value in gaps.items())
        return [
            f"Loss: against {baseline.schedule}, over {len(values)} values of {axis}, {compared[0].schedule} "
            f"changes the validation loss (nats per token) {changes}."
        ]
    changes = "; ".join(
        f"of {arm} by {', '.join(_number(by_value.get(value)) for value in values)}"
        for arm, by_value in gaps.items()
    )
    return [
        f"Loss: against {baseline.schedule}, at {axis} = {', '.join(values)}, {compared[0].schedule} changes "
        f"the validation loss (nats per token) {changes}."
    ]


def _extremes(gaps: Mapping[str, float], axis: str) -> str:
    """The least and the largest gap, with the values of the axis that they are at."""
    low, high = min(gaps, key=gaps.__getitem__), max(gaps, key=gaps.__getitem__)
    if f"{gaps[low]:+.3f}" == f"{gaps[high]:+.3f}":
        return f"{gaps[low]:+.3f} at each"
    return f"{gaps[low]:+.3f} ({axis} {low}) to {gaps[high]:+.3f} ({high})"


def _number(gap: float | None) -> str:
    return "?" if gap is None else f"{gap:+.3f}"


def _correction(cell: CellResult) -> str:
    """The cell's corrections, with the settings in which cells differ; empty without a correction."""
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


def _optimizer_changes(cells: Sequence[CellResult]) -> str:
    """An optimizer's gaps: uncorrected, then with each correction and the share of the gap it recovers."""
    parts = [f"by {cell.gap:+.3f}{_updates(cell)}" for cell in cells if not cell.corrected]
    for cell in cells:
        if not cell.corrected:
            continue
        share = ""
        if cell.recovered is not None:
            share = f" ({cell.recovered:.0%} of the gap closed)" if cell.recovered >= 0 else " (a wider gap)"
        parts.append(f"with {_correction(cell)} by {cell.gap:+.3f}{_updates(cell)}{share}")
    return f"of {cells[0].optimizer} {', '.join(parts)}"


def _updates(cell: CellResult) -> str:
    ratio = cell.update_ratio
    return "" if ratio in (None, 1.0) else f" with {ratio:g} times the updates"


def _speed_sentences(delayed: Sequence[CellResult]) -> list[str]:
    sentences = []
    timed = [cell for cell in delayed if cell.throughput_ratio is not None]
    for cells in grouped(timed, lambda cell: (cell.schedule, cell.fastest and cell.fastest.schedule)):
        schedule, fastest = cells[0].schedule, cells[0].fastest
        assert fastest is not None
        ratios = span(
            [cell.throughput_ratio for cell in cells if cell.throughput_ratio is not None], "{:.2f}"
        )
        intervals = [cell.throughput_interval for cell in cells if cell.throughput_interval is not None]
        not_told = [each for each in intervals if each.low <= 1 <= each.high]
        sentence = (
            f"Speed: {schedule} trains on {ratios} times as many tokens per second as {fastest.schedule}"
        )
        if intervals and len(not_told) == len(cells):
            sentence = (
                f"Speed: the tokens per second of {schedule} and {fastest.schedule} cannot be told apart: "
                f"{ratios} times as many"
            )
        if told := [each for each in intervals if not each.says_nothing]:
            ends = f"{min(each.low for each in told):.2f} to {max(each.high for each in told):.2f}"
            sentence += f" ({CONFIDENCE:.0%} interval{'s' * (len(told) > 1)}: {ends})"
        if 0 < len(not_told) < len(cells):
            sentence += f"; {len(not_told)} of {len(cells)} intervals hold 1"
        if wide := len(intervals) - len(told):
            which = (
                "its interval spans" if wide == len(cells) == 1 else f"{wide} of {len(cells)} intervals span"
            )
            sentence += f"; {which} more than a factor of {MOST_FACTOR:g}"
        own = [cell.bubble.mean for cell in cells if cell.bubble is not None]
        base = [cell.fastest.bubble.mean for cell in cells if cell.fastest and cell.fastest.bubble]
        if own and base:
            waits, base_waits = span(own, "{:.0%}"), span(base, "{:.0%}")
            sentence += f"; its ranks wait {waits} of the time instead of {base_waits}"
        if busy := busy_text([*cells, *(cell.fastest for cell in cells if cell.fastest is not None)]):
            sentence += f". {busy}"
        sentences.append(f"{sentence}.")
        if too_fast := [cell for cell in cells if cell.is_too_fast]:
            bounds = span([cell.throughput_bound or 0.0 for cell in too_fast], "{:.2f}")
            sentences.append(
                f"Too fast: without a bubble {schedule} can be at most {bounds} times as fast as "
                f"{fastest.schedule}, by the simulator with equal stages and messages that take no time. "
                "More than that comes from other programs on the machine, from slow messages, or from "
                "chance: measure again on a quiet machine before you believe it."
            )
    return sentences


def _slowest_sentences(cells: Sequence[CellResult]) -> list[str]:
    """The rank that others wait for, and the machine that is slower than others with the same work: each in
    the run where it is slowest."""
    known = [(cell, run, found) for cell in cells if (run := cell.least_even) and (found := cell.slowest)]
    sentences = []
    for cell, run, found in sorted(known, key=lambda each: -each[2].ratio)[:1]:
        if found.ratio < UNEVEN:
            continue
        path = run.id if run.folder is None else run.folder.parents[1] / run.id
        sentences.append(
            f"Balance: in {cell.name} (run {run.id}) rank {found.rank} computes {found.ratio:.2f} "
            "times as long as the mean of the ranks, which wait for it; "
            f"`{command('plan', path, '--balance')}` finds a more even cut."
        )
    for cell, run, found in sorted(known, key=lambda each: -(each[2].peer_ratio or 0.0))[:1]:
        if not found.peer or not found.peer_ratio or found.peer_ratio < UNEVEN:
            continue
        rank, data_rank = found.peer
        sentences.append(
            f"Slow machine: in {cell.name} (run {run.id}) data rank {data_rank} of rank {rank}, on "
            f"{found.host}, takes {found.peer_ratio:.2f} times as long as the other data ranks with the same "
            "work."
        )
    return sentences


def _target_sentences(delayed: Sequence[CellResult]) -> list[str]:
    ratios = [cell.time_to_target_ratio for cell in delayed if cell.time_to_target_ratio is not None]
    target = delayed[0].target
    if not ratios or target is None:
        return []
    return [
        f"Time: to a validation loss of {target:g} the delayed cells train {span(ratios, '{:.2f}')} times "
        "as fast as the synchronous ones."
    ]


def _more_updates(delayed: Sequence[CellResult]) -> list[str]:
    """Schedules whose gap also holds the effect of more updates."""
    sentences = []
    for schedule in dict.fromkeys(cell.schedule for cell in delayed):
        ratios = {cell.update_ratio for cell in delayed if cell.schedule == schedule and cell.gap is not None}
        if other := sorted(ratio for ratio in ratios if ratio not in (None, 1.0)):
            sentences.append(
                f"Not like with like: on the same tokens {schedule} makes {span(other, '{:g}')} times the "
                "updates of its synchronous counterpart, and its gap includes their effect."
            )
    return sentences


def _diverged(cells: Sequence[CellResult]) -> list[str]:
    """Arms that lost seeds by their own fault."""
    found = [
        f"{cell.name} in {len(cell.diverged)} of {len(cell.runs)} seeds" for cell in cells if cell.diverged
    ]
    if not found:
        return []
    others = any(0 < len(cell.diverged) < len(cell.runs) for cell in cells)
    rest = " Losses and gaps there are those of the runs that are complete." if others else ""
    return [f"Diverged: {_first(found)}.{rest}"]


def _unpaired(delayed: Sequence[CellResult]) -> list[str]:
    """Seeds that only one arm of a gap has."""
    left_out = [
        f"{cell.name} without seed {', '.join(map(str, cell.gap_pairs.unpaired))}"
        + ("" if cell.gap_pairs.seeds else ", so without a gap")
        for cell in delayed
        if cell.gap_pairs.unpaired
    ]
    if not left_out:
        return []
    return [f"Gaps are over the seeds of both arms: {_first(left_out)}."]


def _first(texts: Sequence[str]) -> str:
    """The first of them, and the number of the others."""
    more = f"; and {len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else ""
    return f"{'; '.join(texts[:MAX_NAMED])}{more}"


def _certainty(delayed: Sequence[CellResult]) -> list[str]:
    """The gaps that are not significant."""
    intervals = [(cell.name, cell.gap_pairs.interval) for cell in delayed]
    unclear = [name for name, interval in intervals if interval is not None and interval.holds_zero]
    return [f"Not distinguishable from zero: {_first(unclear)}."] if unclear else []


def _caveats(delayed: Sequence[CellResult]) -> list[str]:
    compared = [cell for cell in delayed if cell.gap is not None]
    if not compared:
        return []
    sentences = []
    fewest = min(len(cell.gap_pairs.seeds) for cell in compared)
    if fewest < FEW_SEEDS:
        seeds = "one seed" if fewest == 1 else f"{fewest} seeds"
        sentences.append(
            f"Certainty: some gaps rest on {seeds} (n = {fewest}); a small gap may be chance."
            f"{_remedy(compared)}"
        )
    short = [tokens for tokens in (_tokens_per_parameter(cell) for cell in compared) if tokens is not None]
    if short and min(short) < TOKENS_PER_PARAMETER:
        sentences.append(
            f"A short run ({min(short):.2g} tokens per parameter; {TOKENS_PER_PARAMETER} are usual) spends "
            "most of its steps at a high learning rate and exaggerates gaps."
        )
    return sentences


def _remedy(compared: Sequence[CellResult]) -> str:
    """The command that adds seeds to the experiment; empty for cells of several or of none, and for those
    that were chosen among others, which would get seeds as well."""
    folders = {run.folder.parents[1] for cell in compared for run in cell.runs if run.folder is not None}
    if len(folders) != 1 or any(cell.chosen for cell in compared):
        return ""
    (folder,) = folders
    setting = seeds_setting(compared, FEW_SEEDS)
    return f" `{command('sweep', whole_template(folder), setting, '--out', folder)}` adds seeds."


def _tokens_per_parameter(cell: CellResult) -> float | None:
    for run in cell.runs:
        start = run.start
        parameters = None if start is None else start.active_parameters or start.parameters
        if start is not None and start.tokens_per_step and parameters:
            return run.steps_done * start.tokens_per_step / parameters
    return None
