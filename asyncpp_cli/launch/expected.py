"""What a launch is expected to cost, where `run.gpu` of the site or the runs names the GPUs; and how long it
is expected to take on this machine."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from asyncpp_cli.base.errors import DamagedError
from asyncpp_cli.experiment.matrix import ResolvedCell
from asyncpp_cli.launch.common.options import NO_PAUSES, Pauses
from asyncpp_cli.launch.local_machine import Task
from asyncpp_cli.planner.cells import expected
from asyncpp_cli.planner.here import are_long, said_of_all, seconds_here, together
from asyncpp_cli.runs.attempts.cost import amount
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.status import UNKNOWN, is_done
from asyncpp_cli.sites.profile import Site
from asyncpp_cli.sites.resources import Machine, this_machine
from stages.config.run_config import RunConfig


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
        if status.state in UNKNOWN or is_done(status, until=pauses.get(run.id)):
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


def expected_line(configs: Sequence[RunConfig]) -> str:
    """A sentence on how long these runs take here, of those where that is known; empty if it is little."""
    if not are_long(configs):
        return ""
    seconds = seconds_here(configs, machine=this_machine())
    return said_of_all(configs, seconds) if any(seconds) else ""


def expected_seconds(tasks: Sequence[Task], *, machine: Machine) -> tuple[dict[str, float], str]:
    """The seconds that each run adds to the launch, by id, and a sentence on all.

    Both are empty where the runs take little time, or where it is unknown of one.
    """
    configs = [
        replace(task.config, train=replace(task.config.train, steps=task.until or task.config.train.steps))
        for task in tasks
    ]
    if not are_long(configs):
        return {}, ""
    known = [each for each in seconds_here(configs, machine=machine) if each is not None]
    if len(known) < len(tasks):
        return {}, ""
    share = together(configs, known, machine=machine) / math.fsum(known)
    added = {task.run.id: each * share for task, each in zip(tasks, known, strict=True)}
    return added, said_of_all(configs, known)
