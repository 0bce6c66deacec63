"""A tuning as a table, sentences and records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncpp_cli.base.console import command
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.base.tables import printed
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.tune.plan import Plan, plan_in
from asyncpp_cli.tune.standing import ArmStanding, has_edges, standings


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A tuning and how its arms stand."""

    plan: Plan
    arms: Sequence[ArmStanding]

    @property
    def sentences(self) -> list[str]:
        """What was tried, the best of each arm, and what it cost."""
        points = len(self.arms[0].arm.candidates)
        bests = "; ".join(f"{_values(self.plan, each)} of {self.name_of(each)}" for each in self.arms)
        over = " and ".join(self.plan.question.over)
        return [
            f"Tuned over {over}, {points} points in each arm; the best by validation loss: {bests}.",
            *self.remarks,
        ]

    @property
    def records(self) -> list[dict[str, Any]]:
        """A record for each arm: its best values, every candidate with its last rung and loss, the steps."""
        return [_record(self.plan, each) for each in self.arms]

    @property
    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and a row for each arm."""
        rows = [
            [
                *(printed(axis, each.arm.axes.get(axis)) for axis in self._varying),
                *_best(self.plan, each),
                f"{each.steps:,} of {each.arm.grid_steps:,}",
                _state(each),
            ]
            for each in self.arms
        ]
        return [*self._varying, *self.plan.keys, "val loss", "steps of the grid's", "state"], rows

    @property
    def remarks(self) -> list[str]:
        """The price of the tuning, bests on the edge, and runs that failed."""
        plan, arms = self.plan, self.arms
        steps, of_grid = sum(each.steps for each in arms), sum(each.arm.grid_steps for each in arms)
        lines = []
        if any(each.due for each in arms):
            lines.append(f"Tuning has taken {steps:,} steps so far; the grid takes {of_grid:,}.")
        elif steps:
            saved = f", {of_grid / steps:.1f} times fewer" if steps < of_grid else ""
            lines.append(f"Tuning took {steps:,} steps; the grid takes {of_grid:,}{saved}.")
        edges = [(each, [key for key in plan.keys if each.on_edge(key)]) for each in arms]
        if beyond := [(each, keys) for each, keys in edges if keys]:
            named = "; ".join(f"{' and '.join(keys)} of {self.name_of(each)}" for each, keys in beyond)
            lines.append(f"On the edge of the values tried, so a better one may lie beyond: {named}.")
        elif all(each.best is not None and has_edges(each.tried(key)) for each in arms for key in plan.keys):
            lines.append("Every best value lies inside of what was tried.")
        for each in arms:
            for compared in each.candidates:
                lines += [
                    f"{run.id} failed and counts as last: {run.status.reason}." for run in compared.failed
                ]
        return lines

    def name_of(self, each: ArmStanding) -> str:
        """An arm's values on the axes in which arms differ."""
        return ", ".join(f"{axis}={printed(axis, each.arm.axes.get(axis))}" for axis in self._varying)

    @property
    def _varying(self) -> list[str]:
        """Axes in which the arms differ; the schedule if there is one arm."""
        axes = list(self.arms[0].arm.axes)
        values = {axis: {repr(each.arm.axes.get(axis)) for each in self.arms} for axis in axes}
        return [axis for axis in axes if len(values[axis]) > 1] or axes[:1]


def best_runs(experiment: Experiment) -> list[Run]:
    """The runs of the best candidate of each arm; arms whose candidates all failed have none.

    Raises:
        UserError: the experiment is not tuned, or not completely.
    """
    arms = standings(experiment, plan_in(experiment.folder), scheduler=None)
    if any(each.due for each in arms):
        raise UserError(
            f"{experiment.folder} is not tuned completely: {command('tune', experiment.folder)} goes on"
        )
    ids = [run for each in arms if each.best is not None for run in each.best.candidate.runs]
    if not ids:
        raise UserError(f"{experiment.folder}: every candidate failed; there is no best run")
    return [experiment.run(run) for run in ids]


def _record(plan: Plan, each: ArmStanding) -> dict[str, Any]:
    best = each.best
    return {
        "axes": dict(each.arm.axes),
        "complete": not each.due,
        "best": None if best is None else dict(best.candidate.values),
        "runs": [] if best is None else list(best.candidate.runs),
        "val_loss": None if best is None else best.loss,
        "on_edge": [key for key in plan.keys if each.on_edge(key)],
        "rungs": list(each.arm.rungs),
        "steps": each.steps,
        "grid_steps": each.arm.grid_steps,
        "candidates": [
            {
                "values": dict(compared.candidate.values),
                "runs": list(compared.candidate.runs),
                "step": compared.step,
                "val_loss": None
                if compared.loss is None or not math.isfinite(compared.loss)
                else compared.loss,
                "val_loss_by_step": {
                    step: loss for step, loss in compared.losses.items() if math.isfinite(loss)
                },
                "failed": [run.id for run in compared.failed],
            }
            for compared in each.candidates
        ],
    }


def _best(plan: Plan, each: ArmStanding) -> list[str]:
    if each.best is None or each.best.loss is None:
        return [*("" for _ in plan.keys), ""]
    values = [
        f"{printed(key, each.best.candidate.values[key])}{' (edge)' if each.on_edge(key) else ''}"
        for key in plan.keys
    ]
    return [*values, f"{each.best.loss:.4f}"]


def _values(plan: Plan, each: ArmStanding) -> str:
    """The best values so far, and whether they are final."""
    if each.best is None and not each.due:
        return "none (every candidate failed)"
    values = " and ".join(printed(key, each.leading.candidate.values[key]) for key in plan.keys)
    return values if each.best is not None else f"{values} (not complete)"


def _state(each: ArmStanding) -> str:
    if each.due:
        waiting = "1 run" if len(each.due) == 1 else f"{len(each.due)} runs"
        return f"rung {each.rung + 1} of {len(each.arm.rungs)}: {waiting} to step {each.arm.rungs[each.rung]}"
    return "complete" if each.best is not None else "every candidate failed"
