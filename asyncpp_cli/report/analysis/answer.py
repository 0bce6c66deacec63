"""The first line of a report: the arm with the lowest loss, the arm behind it, and what all runs cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from asyncpp_cli.report.analysis.cells import CellResult
from asyncpp_cli.report.analysis.conditions import busy_text
from asyncpp_cli.report.analysis.statistics import Pairs, pairs
from asyncpp_cli.runs.attempts.cost import cost_text, total

_MOST_NAMED = 2


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The best arm of a report."""

    best: CellResult
    sentence: str


def answer(cells: Sequence[CellResult]) -> Answer | None:
    """The arm with the lowest mean loss; None without a loss that is finite."""
    ordered = by_loss(cells)
    if not ordered or mean_loss(ordered[0]) == math.inf:
        return None
    best = ordered[0]
    others = [cell for cell in ordered[1:] if mean_loss(cell) < math.inf and not _is_same_arm(best, cell)]
    parts = [f"Best: {best.name}, {_loss_text(best)}"]
    if others:
        compared = pairs(others[0].losses, best.losses)
        parts.append(f"{others[0].name} {difference_text(compared)}")
    if unlike := _unlike(best, cells):
        parts.append(f"not like with like: {unlike}")
    if (cost := total(cell.cost for cell in cells)) is not None:
        parts.append(f"cost {cost_text(cost)}")
    busy = "" if busy_text(cells) is None else " The machine was busy: do not trust the speeds."
    return Answer(best=best, sentence=f"{'; '.join(parts)}.{busy}")


def mean_loss(cell: CellResult) -> float:
    """The mean validation loss of a cell; infinite if it has none of its own, or one that is not finite."""
    loss = cell.val_loss
    return loss.mean if loss is not None and math.isfinite(loss.mean) and not cell.speed_only else math.inf


def by_loss(cells: Sequence[CellResult]) -> list[CellResult]:
    """The cells by their mean loss, those without one last."""
    return sorted(cells, key=mean_loss)


def difference_text(compared: Pairs) -> str:
    """A difference of losses over common seeds, with its interval and whether it can be told from zero."""
    if compared.mean is None:
        return "(no common seed)"
    interval = compared.interval
    if interval is None:
        return f"{compared.mean:+.3f} (one seed)"
    ends = f"({interval.low:+.3f} to {interval.high:+.3f})"
    return f"{compared.mean:+.3f} {ends}" + (": undecided" if interval.holds_zero else "")


def _loss_text(cell: CellResult) -> str:
    loss = cell.val_loss
    assert loss is not None
    if loss.interval is None:
        return f"{loss.mean:.3f} (one seed)"
    return f"{loss.mean:.3f} ({loss.interval.low:.3f} to {loss.interval.high:.3f})"


def _is_same_arm(one: CellResult, other: CellResult) -> bool:
    """Whether two cells differ in their synchronous schedule alone, so that their losses are the same."""

    return one.synchronous and other.synchronous and one.without("schedule.") == other.without("schedule.")


def _unlike(best: CellResult, cells: Sequence[CellResult]) -> str:
    """The arms that differ from the best one in steps, updates per step or seeds, those with the same reason
    together; empty if none does."""
    steps, seeds = best.value("train.steps"), best.losses.keys()
    found: dict[str, list[str]] = {}
    for cell in cells:
        if cell is best or mean_loss(cell) == math.inf:
            continue
        if cell.value("train.steps") != steps:
            reason = f"{cell.value('train.steps')} steps, not {steps}"
        elif cell.updates_per_step != best.updates_per_step and cell.updates_per_step is not None:
            reason = f"{cell.updates_per_step:g} updates per step"
        elif lacking := sorted(seeds ^ cell.losses.keys(), key=str):
            reason = f"seeds: {', '.join(map(str, lacking))} in one of both alone"
        else:
            continue
        found.setdefault(reason, []).append(cell.name)
    return ", ".join(f"{_first(names)} ({reason})" for reason, names in found.items())


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more}"
