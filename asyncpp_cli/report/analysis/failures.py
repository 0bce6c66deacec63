"""Runs that ended early, or cannot be read, in groups of the same reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from asyncpp_cli.report.analysis.cells import CellResult, value_text
from asyncpp_cli.report.load.run import RunResult, grouped
from asyncpp_cli.runs.status import State

_MOST_IDS = 2
"""Ids that a line of text names."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Runs with one reason."""

    about: str
    """How many, which, and why."""
    ids: tuple[str, ...]

    @property
    def line(self) -> str:
        """On one line, with the first ids."""
        more = f" and {len(self.ids) - _MOST_IDS} more" if len(self.ids) > _MOST_IDS else ""
        return f"{self.about} ({', '.join(self.ids[:_MOST_IDS])}{more})"


def failures(cells: Sequence[CellResult]) -> list[Failure]:
    """The runs that have a reason, those with the same but for its numbers together."""
    ended = [(cell, run) for cell in cells for run in cell.runs if run.reason is not None]
    return [_failure(cells, group) for group in grouped(ended, lambda each: _kind(each[1]))]


def _kind(run: RunResult) -> tuple[str, bool, str]:
    """State and reason without what names the run, and without numbers but where they say what is damaged."""
    text = (run.reason or "").replace(run.id, "")
    if run.state != State.DAMAGED:
        text = "" if run.diverged else re.sub(r"\d+", "", text)
    return run.state, run.diverged, text


def _failure(cells: Sequence[CellResult], group: Sequence[tuple[CellResult, RunResult]]) -> Failure:
    runs = [run for _, run in group]
    count = f"{len(runs)} run{'s' * (len(runs) > 1)}"
    shared = _shared(cells, [cell for cell, _ in group])
    which = f"{count} ({shared})" if shared else count
    first = runs[0]
    if first.diverged and first.state == "failed":
        begins = min(run.steps_done - run.skipped_last + 1 for run in runs)
        why = f"the gradient was not finite from update {begins} on; lower optimizer.lr"
    else:
        why = f"{first.state}: {first.reason}"
    return Failure(about=f"{which}: {why}", ids=tuple(run.id for run in runs))


def _shared(cells: Sequence[CellResult], group: Sequence[CellResult]) -> str:
    """The values that all cells of the group have, and not all cells of the report."""

    def values(of: Sequence[CellResult], key: str) -> dict[str, None]:
        named = ("schedule", "optimizer", "model")
        return dict.fromkeys(
            str(getattr(cell, key)) if key in named else value_text(cell.axes.get(key)) for cell in of
        )

    keys = ["schedule", "optimizer", "model", *(cells[0].axes if cells else ())]
    found = [
        (key, *values(group, key))
        for key in keys
        if len(values(group, key)) == 1 and len(values(cells, key)) > 1
    ]
    return ", ".join(
        value if key in ("schedule", "optimizer", "model") else f"{key.rpartition('.')[2]} {value}"
        for key, value in found
    )
