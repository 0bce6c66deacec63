"""Links each cell to its synchronous counterpart, and to the same cell without correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asyncpp_cli.experiment.template import SHORTHANDS
from asyncpp_cli.report.analysis.cells import CellResult, arm_names
from asyncpp_cli.report.load.run import Settings

CORRECTION = ("error_feedback.", "correction.")
"""Sections of the configuration that correct for delay."""

PREFERRED = "1f1b"
"""The synchronous schedule to compare losses with if there are several."""

LENGTH = ("train.steps", "train.eval_interval", "train.checkpoint_interval")
"""Keys in which the runs of an arm differ from length to length; the speed does not depend on them."""

_MOST_COMPARED = 200
"""Limit of cells in the search for the nearest synchronous cell."""

_MOST_NAMED = 4
"""Keys that a sentence names."""


def linked(cells: Sequence[CellResult], *, ignoring: Sequence[str]) -> tuple[list[CellResult], list[str]]:
    """Each cell with its `baseline`, `fastest` and `uncorrected` cell.

    Counterparts differ in schedule and corrections alone; they share `schedule.microbatches`, which decides
    the tokens per step.

    Args:
        cells: of all experiments.
        ignoring: configuration keys that may differ, too.

    Returns:
        The cells in order, and remarks on delayed cells without a counterpart.
    """
    ignored = tuple(SHORTHANDS.get(key, key) for key in ignoring)
    compared = [_settings_without(cell, "schedule.", *CORRECTION, *ignored) for cell in cells]
    candidates: dict[Settings, list[CellResult]] = {}
    for cell, settings in zip(cells, compared, strict=True):
        if cell.synchronous and settings is not None:
            candidates.setdefault(settings, []).append(cell)
    with_baseline = [
        replace(cell, baseline=_baseline(cell, candidates.get(settings, []) if settings else []))
        for cell, settings in zip(cells, compared, strict=True)
    ]
    with_baseline = _with_fastest(with_baseline, ignored)
    arms = [_settings_without(cell, *CORRECTION, *ignored) for cell in with_baseline]
    uncorrected = {arm: cell for cell, arm in zip(with_baseline, arms, strict=True) if not cell.corrected}
    with_both = [
        replace(cell, uncorrected=uncorrected.get(arm) if cell.corrected and arm is not None else None)
        for cell, arm in zip(with_baseline, arms, strict=True)
    ]
    return with_both, _without_counterpart(with_both, compared)


def _with_fastest(cells: Sequence[CellResult], ignored: Sequence[str]) -> list[CellResult]:
    """Each cell with the fastest synchronous cell of its settings, of any length."""
    shared = [_settings_without(cell, "schedule.", *CORRECTION, *LENGTH, *ignored) for cell in cells]
    fastest: dict[Settings, CellResult] = {}
    for cell, settings in zip(cells, shared, strict=True):
        if cell.synchronous and settings is not None and cell.tokens_per_second is not None:
            known = fastest.get(settings, cell).tokens_per_second
            if known is None or cell.tokens_per_second.mean >= known.mean:
                fastest[settings] = cell
    found = [fastest.get(settings) if settings is not None else None for settings in shared]
    return [
        replace(cell, fastest=None if other is cell else other)
        for cell, other in zip(cells, found, strict=True)
    ]


def _settings_without(cell: CellResult, *prefixes: str) -> Settings | None:
    """The cell's settings without the seed, the site and keys with these prefixes; None if unknown."""
    if cell.config is None:
        return None
    left_out = (*prefixes, "seed", "site.")
    return cell.settings(lambda key: key == "schedule.microbatches" or not key.startswith(left_out))


def _baseline(cell: CellResult, matched: Sequence[CellResult]) -> CellResult | None:
    first = matched[0] if matched else None
    preferred = next((other for other in matched if other.schedule == PREFERRED), first)
    if preferred is None or preferred.schedule == cell.schedule:
        # The cell itself, or one that differs in ignored keys alone.
        return None
    return preferred


def _without_counterpart(cells: Sequence[CellResult], compared: Sequence[Settings | None]) -> list[str]:
    """Remarks on delayed cells without a counterpart, with the keys in which the nearest one differs."""
    known = [(cell, name, s) for cell, name, s in zip(cells, arm_names(cells), compared, strict=True) if s]
    lengths: dict[Settings | None, set[object]] = {}
    for cell, _, _ in known:
        lengths.setdefault(_settings_without(cell, *LENGTH), set()).add(cell.value("train.steps"))
    # An arm of several lengths is compared by its verdict.
    known = [each for each in known if len(lengths[_settings_without(each[0], *LENGTH)]) == 1]
    synchronous = [settings for cell, _, settings in known if cell.synchronous][:_MOST_COMPARED]
    alone = [
        (name, settings) for cell, name, settings in known if not cell.synchronous and cell.baseline is None
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
