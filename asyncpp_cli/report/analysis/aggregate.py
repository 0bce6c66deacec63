"""Averages runs over seeds into cells, and links each cell to its synchronous counterpart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from asyncpp_cli.experiment.template import SHORTHANDS
from asyncpp_cli.report.analysis.cells import CellResult, arm_names, value_text
from asyncpp_cli.report.analysis.counterparts import linked
from asyncpp_cli.report.load.run import RunResult, Settings, grouped, settings_of
from schedules import FAMILY


def aggregate(runs: Sequence[RunResult]) -> tuple[list[CellResult], list[str]]:
    """Cells in the order of their first run, and remarks on the averaging."""
    cells, notes, _ = aggregate_best(runs)
    return cells, notes


def aggregate_best(
    runs: Sequence[RunResult],
    *,
    keys: Sequence[str] = (),
    best_over: Sequence[str] = (),
    tuned: Sequence[str] = (),
    target: float | None = None,
) -> tuple[list[CellResult], list[str], list[str]]:
    """As `aggregate`; also returns sentences on the values that were kept.

    Args:
        runs: of one or several experiments.
        keys: configuration keys to show even if the cells do not differ in them.
        best_over: configuration keys of which each arm keeps only the best value (`keep_best`).
        tuned: configuration keys whose value was chosen for each arm before (`asyncpp tune`).
        target: validation loss, nats per token, to measure steps and time to.
    """
    groups = _group_by_all_but_seed(runs)
    shown, notes = _further_keys(groups, wanted=[*keys, *best_over, *tuned])
    cells = [_cell(group, shown, target) for group in groups]
    choices: list[str] = []
    if best_over:
        cells, choices = keep_best(cells, best_over)
    chosen = (*best_over, *tuned)
    cells = [replace(cell, chosen=chosen) for cell in cells]
    cells, lacking = linked(cells, ignoring=chosen)
    cell_of = {run.id: cell for cell in cells for run in cell.runs}
    cells = [replace(cell, loss_of=cell_of.get(cell.runs[0].loss_of or "")) for cell in cells]
    return cells, [*notes, *lacking], choices


def _group_by_all_but_seed(runs: Sequence[RunResult]) -> list[list[RunResult]]:
    """Groups of runs with the same configuration but for the seed; by axes where it cannot be read."""
    configuration_of_axes: dict[Settings, Settings] = {}

    def configuration(run: RunResult) -> Settings:
        return settings_of(run.config or {}, lambda key: not key.startswith(("seed", "site.")))

    def axes(run: RunResult) -> Settings:
        return settings_of(run.axes, lambda key: not key.startswith("seed"))

    for run in runs:
        if run.config is not None:
            configuration_of_axes.setdefault(axes(run), configuration(run))
    return grouped(
        runs,
        lambda run: (
            configuration_of_axes.get(axes(run), axes(run)) if run.config is None else configuration(run)
        ),
    )


def _label(run: RunResult, keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(repr(run.value(key)) for key in keys)


def _further_keys(
    groups: Sequence[Sequence[RunResult]], *, wanted: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Keys other than the named ones that distinguish the cells, and a note if some of them are not axes.

    First the wanted keys, then the template's axes, then keys that tell apart groups that are still alike.
    """
    named = {*SHORTHANDS, *SHORTHANDS.values(), "seed"}
    axes = (key for group in groups for run in group for key in run.axes)
    keys = list(dict.fromkeys(key for key in (*wanted, *axes) if key not in named))
    alike = grouped((group[0] for group in groups), lambda run: _label(run, [*SHORTHANDS, *keys]))
    differing: dict[str, None] = {}
    for same_label in alike:
        configs = [run.config for run in same_label if run.config is not None]
        if len(configs) < 2:
            continue
        for key in sorted({key for config in configs for key in config} - {"seed"}):
            if not key.startswith("site.") and len({repr(config.get(key)) for config in configs}) > 1:
                differing[key] = None
    if not differing:
        return keys, []
    note = f"Runs that also differ in {', '.join(differing)} were not averaged: they have separate rows."
    return [*keys, *differing], [note]


def _cell(group: Sequence[RunResult], keys: Sequence[str], target: float | None) -> CellResult:
    first = next((run for run in group if run.config is not None), group[0])
    schedule = str(first.value("schedule") or "?")
    return CellResult(
        schedule=schedule,
        optimizer=str(first.value("optimizer") or "?"),
        error_feedback=float(first.value("error_feedback") or 0.0),
        model=str(first.value("model") or "?"),
        axes={key: first.value(key) for key in keys},
        runs=tuple(group),
        synchronous=_is_synchronous(schedule, group),
        target=target,
    )


def _is_synchronous(schedule: str, runs: Sequence[RunResult]) -> bool:
    """Whether a schedule has no delay: as declared, or for a custom one as its runs measured."""
    if schedule in FAMILY:
        return FAMILY[schedule].synchronous
    measured = [run.measurement for run in runs if run.measurement.delay is not None]
    return bool(measured) and all(values.delay == values.mismatch == 0 for values in measured)


def keep_best(cells: Sequence[CellResult], keys: Sequence[str]) -> tuple[list[CellResult], list[str]]:
    """Of cells that differ in `keys` alone, keep the one with the lowest mean validation loss.

    An arm without a completed cell keeps all its cells.

    Args:
        cells: not linked with each other yet.
        keys: configuration keys.

    Returns:
        The kept cells, in order, and sentences that give for each arm the values tried, the best one, and
        whether it is the smallest or largest tried.
    """
    arms = grouped(cells, lambda cell: _arm(cell, keys))
    kept: list[CellResult] = []
    counts: list[int] = []
    best_by_values: dict[str, list[str]] = {}
    names = arm_names([arm[0] for arm in arms], without=keys)
    for name, arm in zip(names, arms, strict=True):
        tried = [cell for cell in arm if cell.val_loss is not None and math.isfinite(cell.val_loss.mean)]
        missing = len(arm) - len(tried)
        if not tried:
            kept += arm
            continue
        best = min(tried, key=lambda cell: cell.val_loss.mean if cell.val_loss else math.inf)
        kept.append(best)
        counts.append(best.n)
        values = ", ".join(_printed(cell, keys) for cell in tried)
        without_result = f" ({missing} more without a result)" if missing else ""
        edge = " (on the edge)" if any(_on_edge(best, tried, key) for key in keys) else ""
        entry = f"{name} {_printed(best, keys)}{edge}"
        best_by_values.setdefault(f"{values}{without_result}", []).append(entry)
    return kept, _sentences(best_by_values, " and ".join(keys), counts)


def _sentences(best_by_values: Mapping[str, Sequence[str]], keys: str, counts: Sequence[int]) -> list[str]:
    """The choices, arms with the same values tried in one sentence."""
    sentences = [
        f"Best {keys} of {values}, by mean validation loss: {'; '.join(best)}."
        for values, best in best_by_values.items()
    ]
    if any("(on the edge)" in sentence for sentence in sentences):
        sentences.append(f"On the edge of the values tried: a better {keys} may lie beyond.")
    if any(", " not in values for values in best_by_values):
        sentences.append(f"Arms with one {keys} had no choice.")
    if sentences and len(set(counts)) > 1:
        sentences.append(
            f"The chosen cells have different numbers of runs (n = {min(counts)} to {max(counts)})."
        )
    return sentences


def _arm(cell: CellResult, keys: Sequence[str]) -> Settings:
    """What the cells of an arm have in common."""
    left_out = {*keys, *(SHORTHANDS.get(key, key) for key in keys), "seed"}
    known = cell.runs[0].axes if cell.config is None else cell.config
    return settings_of(known, lambda key: key not in left_out and not key.startswith("site."))


def _printed(cell: CellResult, keys: Sequence[str]) -> str:
    return " and ".join(value_text(cell.value(key)) for key in keys)


def _on_edge(best: CellResult, tried: Sequence[CellResult], key: str) -> bool:
    """Whether the best value is the smallest or largest of several numbers."""
    values = {cell.value(key) for cell in tried}
    if len(values) < 2 or not all(isinstance(value, int | float) for value in values):
        return False
    return best.value(key) in (min(values), max(values))
