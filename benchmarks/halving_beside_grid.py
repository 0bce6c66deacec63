"""Successive halving beside the grid that it saves: does each arm end with the same settings?

    asyncpp tune TEMPLATE --over KEY=RANGE --out DIR && asyncpp launch DIR
    python -m benchmarks.halving_beside_grid DIR...

`launch` trains the candidates that halving left behind to the end, to the bits of a grid. So one folder has
both answers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.tune.result import Tuning, arm_name, tuning_of
from asyncpp_cli.tune.standing import ArmStanding


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What halving and the grid say of an arm."""

    arm: str
    halving: str
    grid: str
    excess: float
    """Loss at the end of halving's best minus that of the grid's best, nats per token."""
    losses: str
    """At the end, by value."""
    steps: int
    grid_steps: int


def answers(tuning: Tuning, ends: Mapping[str, float]) -> list[Answer]:
    """One for each arm.

    Args:
        tuning: complete.
        ends: validation loss at the end of every run of the grid.
    """
    return [_answer(tuning, each, ends) for each in tuning.arms]


def _answer(tuning: Tuning, each: ArmStanding, ends: Mapping[str, float]) -> Answer:
    if each.best is None:
        raise SystemExit(f"{arm_name(each, tuning.arms)}: the tuning is not complete")
    losses = {
        " ".join(f"{value:g}" for value in candidate.values.values()): fmean(
            ends[run] for run in candidate.runs
        )
        for candidate in each.arm.candidates
    }
    named = list(losses)
    halving = named[each.arm.candidates.index(each.best.candidate)]
    # A loss that is not a number is no best.
    grid = min(losses, key=lambda name: losses[name] if math.isfinite(losses[name]) else math.inf)
    return Answer(
        arm=arm_name(each, tuning.arms),
        halving=halving,
        grid=grid,
        excess=losses[halving] - losses[grid],
        losses=", ".join(f"{name}: {loss:.3f}" for name, loss in losses.items()),
        steps=each.steps,
        grid_steps=each.arm.grid_steps,
    )


def _last_loss(run: Run) -> float:
    losses = run.validation_losses()
    return losses[max(losses)] if losses else math.inf


def page(folders: list[str]) -> str:
    """A table of all arms, and their number."""
    lines = ["| experiment | arm | halving | grid | loss above the grid's | loss at the end by value |"]
    lines += ["| --- | --- | ---: | ---: | ---: | --- |"]
    found = []
    for folder in folders:
        experiment = open_experiment(Path(folder))
        tuning = tuning_of(experiment)
        if tuning is None:
            raise SystemExit(f"{folder} is not tuned")
        unfinished = [run.id for run in experiment.runs if run.status().step < run.status().steps]
        if unfinished:
            raise SystemExit(f"{folder}: {len(unfinished)} runs have not ended; asyncpp launch {folder}")
        of_folder = answers(tuning, {run.id: _last_loss(run) for run in experiment.runs})
        lines += [
            f"| {folder} | {each.arm} | {each.halving} | {each.grid} | {each.excess:.4f} | {each.losses} |"
            for each in of_folder
        ]
        found += of_folder
    same = sum(each.halving == each.grid for each in found)
    steps, of_grid = sum(each.steps for each in found), sum(each.grid_steps for each in found)
    lines += ["", f"The same in {same} of {len(found)} arms, with {steps:,} steps instead of {of_grid:,}."]
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m benchmarks.halving_beside_grid DIR...")
    print(page(sys.argv[1:]))
