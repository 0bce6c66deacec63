"""What a launch is expected to cost, where `run.gpu` of the site or the runs names the GPUs."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from asyncpp_cli.base.errors import DamagedError
from asyncpp_cli.experiment.matrix import ResolvedCell
from asyncpp_cli.launch.common.options import NO_PAUSES, Pauses
from asyncpp_cli.planner.cells import expected
from asyncpp_cli.runs.attempts.cost import amount
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.status import State, is_done
from asyncpp_cli.sites.profile import Site


@dataclass(frozen=True, kw_only=True)
class ExpectedCost:
    """The cost of the steps that an experiment's runs still have to train."""

    runs: int
    """Number of runs that are not completed."""
    gpu_hours: float
    """Of those whose GPU is named."""
    unknown: int
    """Number of runs that cannot be estimated."""


def expected_cost(
    experiment: Experiment, site: Site, pauses: Pauses = NO_PAUSES, *, only: Collection[str] | None = None
) -> ExpectedCost:
    """The expected cost of the runs that are not done, or of those in `only`; damaged ones are left out."""
    hours = []
    runs = unknown = 0
    for cell in experiment.cells:
        run = experiment.run(cell.id)
        if only is not None and run.id not in only:
            continue
        status = current_status(run)
        if status.state == State.DAMAGED or is_done(status, until=pauses.get(run.id)):
            continue
        runs += 1
        try:
            config = run.config()
        except DamagedError:
            unknown += 1
            continue
        until = min(config.train.steps, pauses.get(run.id, config.train.steps))
        steps = max(0, until - (run.saved_step or 0))
        resolved = ResolvedCell(cell, config)
        # A run that does not fit is reported by what follows, not here.
        [estimate] = expected(experiment.template, [resolved], site=site, check_memory=False)
        of_run = estimate.gpu_hours(config, steps=steps)
        if of_run is not None:
            hours.append(of_run)
        else:
            unknown += 1
    return ExpectedCost(runs=runs, gpu_hours=math.fsum(hours), unknown=unknown)


def cost_line(cost: ExpectedCost) -> str:
    """What a launch is expected to cost, in a sentence; empty if that is known of no run."""
    if not cost.gpu_hours:
        return ""
    unknown = f"; unknown for {cost.unknown} of {cost.runs} runs" if cost.unknown else ""
    return f"Estimated cost: {amount(cost.gpu_hours)} GPU-hours{unknown}."


def question(cost: ExpectedCost, site: Site) -> str | None:
    """What to ask before a launch; None if the cost is known and within the site's bound."""
    if site.confirm_hours is None or cost.runs == 0:
        return None
    if cost.unknown:
        return (
            f"the cost of {cost.unknown} of {cost.runs} runs is unknown (run.gpu in {site.file} names the "
            f"GPUs), and confirm_hours is {site.confirm_hours}"
        )
    if cost.gpu_hours <= site.confirm_hours:
        return None
    return (
        f"{cost.runs} runs are expected to take {amount(cost.gpu_hours)} GPU-hours of training, and "
        f"confirm_hours in {site.file} is {site.confirm_hours}"
    )
