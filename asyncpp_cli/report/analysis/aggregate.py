"""Averages runs over seeds into cells, keeps the best of each arm (`--best-over`), and links each cell to its
synchronous counterpart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.experiment.template import SHORTHANDS
from asyncpp_cli.report.analysis.cells import CellResult, arm_names, value_text
from asyncpp_cli.report.load.run import RunResult, Settings, grouped, only, settings_of
from asyncpp_cli.tune.standing import is_on_edge
from schedules import KNOWN


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
    """Cells in the order of their first run, remarks, and sentences on the values that were kept.

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
    cell_of = {run.id: cell for cell in cells for run in cell.runs}
    for cell, name in zip(cells, arm_names(cells), strict=True):
        cell.name = name
        cell.chosen = (*best_over, *tuned)
        cell.loss_of = cell_of.get(cell.runs[0].loss_of or "")
    lacking = link(cells, ignoring=(*best_over, *tuned))
    return cells, [*notes, *lacking], choices


def named(cells: Sequence[CellResult], words: str) -> CellResult:
    """The cell whose name has these words, separated by blanks; of several, the one whose name has no others.

    Raises:
        UserError: none has, or several have.
    """
    asked = set(words.split())
    found = [cell for cell in cells if asked <= {*cell.name.split()}]
    exact = [cell for cell in found if {*cell.name.split()} == asked]
    if len(exact or found) != 1:
        what = "no arm has these words" if not found else "several arms have these words"
        accepted = "; ".join(cell.name for cell in found or cells)
        raise UserError(f"--against {words}: {what}; accepted: {accepted}")
    return (exact or found)[0]


def compare_all(cells: Sequence[CellResult], words: str) -> None:
    """Set the cell that is named as the `reference` of the others.

    Raises:
        UserError: as of `named`.
    """
    reference = named(cells, words)
    for cell in cells:
        if cell is not reference:
            cell.compare_with_reference(reference)


def _group_by_all_but_seed(runs: Sequence[RunResult]) -> list[list[RunResult]]:
    """Groups of runs with the same configuration but for the seed; by axes where it cannot be read."""
    keys = [settings_of(run.axes if run.config is None else run.config) for run in runs]
    configuration_of_axes: dict[Settings, Settings] = {}
    for run, key in zip(runs, keys, strict=True):
        if run.config is not None:
            configuration_of_axes.setdefault(settings_of(run.axes), key)
    pairs = grouped(zip(runs, keys, strict=True), lambda pair: configuration_of_axes.get(pair[1], pair[1]))
    return [[run for run, _ in group] for group in pairs]


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
    if schedule in KNOWN:
        return KNOWN[schedule].synchronous
    measured = [run for run in runs if run.delay is not None]
    return bool(measured) and all(run.delay == run.mismatch == 0 for run in measured)


def keep_best(cells: Sequence[CellResult], keys: Sequence[str]) -> tuple[list[CellResult], list[str]]:
    """Keep the cell with the lowest mean validation loss, among those that differ in `keys` alone.

    An arm without a completed cell keeps all its cells.

    Args:
        cells: not linked with each other yet.
        keys: configuration keys.

    Returns:
        The kept cells, in order, and sentences that give for each arm the values tried, the best one, and
        whether it is the smallest or largest tried.
    """
    arms = grouped(cells, lambda cell: arm_settings(cell, keys))
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
        best.tried = tuple(arm)
        kept.append(best)
        counts.append(best.n)
        values = ", ".join(_printed(cell, keys) for cell in tried)
        without_result = f" ({missing} more without a result)" if missing else ""
        edge = (
            " (on the edge)"
            if any(is_on_edge(best.value(key), [cell.value(key) for cell in tried]) for key in keys)
            else ""
        )
        most = max(cell.n for cell in tried)
        fewer = f" (the mean of {best.n}, where another value has {most} runs)" if best.n < most else ""
        entry = f"{name} {_printed(best, keys)}{fewer}{edge}".strip()
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


def arm_settings(cell: CellResult, keys: Sequence[str]) -> Settings:
    """What the cells of an arm have in common."""
    return cell.without(*keys, *(SHORTHANDS.get(key, key) for key in keys))


def _printed(cell: CellResult, keys: Sequence[str]) -> str:
    return " and ".join(value_text(cell.value(key)) for key in keys)


CORRECTION = ("error_feedback.", "correction.")
"""Sections of the configuration that correct for delay."""

_SCHEDULE = ("schedule.", "parallel.shard_gradients")
"""Keys in which counterparts differ. No synchronous schedule can shard gradients, which changes no weight."""

PREFERRED = "1f1b"
"""The synchronous schedule to compare losses with if there are several."""

LENGTH = ("train.steps", "train.eval_interval", "train.checkpoint_interval")
"""Keys in which the runs of an arm differ from length to length; the speed does not depend on them."""

_MOST_COMPARED = 200
"""Limit of cells in the search for the nearest synchronous cell."""

_MOST_NAMED = 4
"""Keys that a sentence names."""


def link(cells: Sequence[CellResult], *, ignoring: Sequence[str]) -> list[str]:
    """Set the cells that each is compared with (`CellResult.compare`).

    Counterparts differ in schedule and corrections alone; they share `schedule.microbatches`, which decides
    the tokens per step.

    Args:
        cells: of all experiments.
        ignoring: configuration keys that may differ, too.

    Returns:
        Remarks on delayed cells without a counterpart.
    """
    ignored = tuple(SHORTHANDS.get(key, key) for key in ignoring)
    compared = [_but_for(cell, *_SCHEDULE, *CORRECTION, *ignored) for cell in cells]
    of_any_length = [_but_for(cell, *_SCHEDULE, *CORRECTION, *LENGTH, *ignored) for cell in cells]
    arms = [_but_for(cell, *CORRECTION, *ignored) for cell in cells]
    synchronous: dict[Settings, list[CellResult]] = {}
    fastest: dict[Settings, CellResult] = {}
    for cell, settings, without_length in zip(cells, compared, of_any_length, strict=True):
        if not cell.synchronous or cell.config is None:
            continue
        synchronous.setdefault(settings, []).append(cell)
        if (speed := cell.tokens_per_second) is not None:
            known = fastest.get(without_length, cell).tokens_per_second
            if known is None or speed.mean >= known.mean:
                fastest[without_length] = cell
    uncorrected = {
        arm: cell for cell, arm in zip(cells, arms, strict=True) if cell.config and not cell.corrected
    }
    for cell, settings, without_length, arm in zip(cells, compared, of_any_length, arms, strict=True):
        if cell.config is not None:
            other = fastest.get(without_length)
            cell.compare(
                baseline=_baseline(cell, synchronous.get(settings, [])),
                fastest=None if other is cell else other,
                uncorrected=uncorrected.get(arm) if cell.corrected else None,
            )
    return _without_counterpart(cells, compared)


def _but_for(cell: CellResult, *names: str) -> Settings:
    """The cell's settings without those of these keys and sections, but with its micro-batches."""
    return cell.without(*names) | only(cell.settings, "schedule.microbatches")


def _baseline(cell: CellResult, matched: Sequence[CellResult]) -> CellResult | None:
    first = matched[0] if matched else None
    preferred = next((other for other in matched if other.schedule == PREFERRED), first)
    if preferred is None or preferred.schedule == cell.schedule:
        # The cell itself, or one that differs in ignored keys alone.
        return None
    return preferred


def _without_counterpart(cells: Sequence[CellResult], compared: Sequence[Settings]) -> list[str]:
    """Remarks on delayed cells without a counterpart, with the keys in which the nearest one differs."""
    lengths: dict[Settings, set[object]] = {}
    for cell in cells:
        lengths.setdefault(_but_for(cell, *LENGTH), set()).add(cell.value("train.steps"))
    # An arm of several lengths is compared by its verdict.
    known = [
        (cell, settings)
        for cell, settings in zip(cells, compared, strict=True)
        if cell.config is not None and len(lengths[_but_for(cell, *LENGTH)]) == 1
    ]
    synchronous = [settings for cell, settings in known if cell.synchronous][:_MOST_COMPARED]
    alone = [
        (cell.name, settings) for cell, settings in known if not cell.synchronous and cell.baseline is None
    ]
    if not synchronous:
        return []
    arms_by_keys: dict[tuple[str, ...], list[str]] = {}
    for name, settings in alone[:_MOST_COMPARED]:
        nearest = min((settings ^ other for other in synchronous), key=len)
        arms_by_keys.setdefault(tuple(sorted({key for key, _ in nearest})), []).append(name)
    lines = []
    for keys, arms in arms_by_keys.items():
        more = f" and {len(arms) - 1} more" if len(arms) > 1 else ""
        differing = f"{', '.join(keys[:_MOST_NAMED])}{', ...' if len(keys) > _MOST_NAMED else ''}"
        lines.append(f"No synchronous counterpart for {arms[0]}{more}: the nearest differs in {differing}.")
    return lines
