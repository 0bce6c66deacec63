"""Losses of a tuning's candidates over a tuned key, for the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncpp_cli.report.analysis.cells import CellResult
from asyncpp_cli.tables import printed
from asyncpp_cli.tune.result import Tuning
from asyncpp_cli.tune.standing import ArmStanding


@dataclass(frozen=True, kw_only=True)
class RungCurve:
    """Losses of an arm's candidates at a rung, by increasing value of a key. Values that are not all numbers
    are text, in the order of the plan."""

    step: int
    is_last: bool
    values: Sequence[Any]
    losses: Sequence[float]
    """Mean validation loss, nats per token."""
    best: int | None
    """Place of the arm's best candidate; None before the tuning is complete and at earlier rungs."""


@dataclass(frozen=True, kw_only=True)
class TunedArm:
    """An arm of a tuning, and its place among the cells of the report."""

    place: int
    standing: ArmStanding

    def curves(self, key: str) -> list[RungCurve]:
        """A curve for each rung that candidates have reached."""
        plotted = [(compared.candidate.values[key], compared) for compared in self.standing.candidates]
        if all(isinstance(value, (int, float)) for value, _ in plotted):
            plotted.sort(key=lambda pair: pair[0])
        else:
            plotted = [(printed(key, value), compared) for value, compared in plotted]
        steps, best = self.standing.arm.rungs, self.standing.best
        curves = []
        for step in steps:
            reached = [(value, compared) for value, compared in plotted if step in compared.losses]
            candidates = [compared for _, compared in reached]
            marked = step == steps[-1] and best in candidates
            if reached:
                curves.append(
                    RungCurve(
                        step=step,
                        is_last=step == steps[-1],
                        values=[value for value, _ in reached],
                        losses=[compared.losses[step] for compared in candidates],
                        best=candidates.index(best) if marked and best is not None else None,
                    )
                )
        return curves


def tuned_arms(tuning: Tuning, cells: Sequence[CellResult]) -> list[TunedArm]:
    """The arms of a tuning that the report has a cell of."""
    place_of = {run.id: place for place, cell in enumerate(cells) for run in cell.runs}
    found = []
    for standing in tuning.arms:
        places = [place_of[run] for run in standing.leading.candidate.runs if run in place_of]
        if places:
            found.append(TunedArm(place=places[0], standing=standing))
    return found


def is_logarithmic(tuning: Tuning, key: str) -> bool:
    """Whether the values of a key are spaced in the logarithm."""
    return tuning.plan.question.over[tuning.plan.keys.index(key)].endswith(":log")


def figure_names(tunings: Sequence[Tuning]) -> dict[str, tuple[Tuning, str]]:
    """A name for each picture of loss over a tuned key."""
    many = len(tunings) > 1
    return {
        f"tuning-{number}-{key}" if many else f"tuning-{key}": (tuning, key)
        for number, tuning in enumerate(tunings, 1)
        for key in tuning.plan.keys
    }
