"""What a launch is expected to cost: on named GPUs by the planner, on CPUs by completed runs of that size."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from asyncpp_cli.errors import DamagedError
from asyncpp_cli.experiment.matrix import ResolvedCell
from asyncpp_cli.launch.options import NO_PAUSES, Pauses
from asyncpp_cli.planner.cells import device_of, estimate_key, expected
from asyncpp_cli.runs.attempts.cost import amount, cost_of_run
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.status import State, is_done
from asyncpp_cli.sites.profile import LOCAL, Site
from asyncpp_cli.sites.resources import this_machine
from stages.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class ExpectedCost:
    """The cost of the steps that an experiment's runs still have to train."""

    runs: int
    """Number of runs that are not completed."""
    gpu_hours: float
    """Of those whose GPU is named."""
    core_hours: float
    """Of those on CPUs, by what completed runs of the same size in the experiment have cost."""
    unknown: int
    """Number of runs that cannot be estimated."""


def expected_cost(
    experiment: Experiment, site: Site, pauses: Pauses = NO_PAUSES, *, only: Collection[str] | None = None
) -> ExpectedCost:
    """The expected cost of the runs that are not done, or of those in `only`; damaged ones are unknown."""
    hours, core_hours = [], []
    runs = unknown = 0
    measured = _core_hours_per_step(experiment)
    # A run that does not fit is reported by what follows, not here.
    settings = device_of(site) | {"memory_gb": None}
    for cell in experiment.cells:
        run = experiment.run(cell.id)
        if (only is not None and run.id not in only) or is_done(
            current_status(run), until=pauses.get(run.id)
        ):
            continue
        runs += 1
        try:
            config = run.config()
        except DamagedError:
            unknown += 1
            continue
        until = min(config.train.steps, pauses.get(run.id, config.train.steps))
        steps = max(0, until - (run.saved_step or 0))
        [estimate] = expected(experiment.template, [ResolvedCell(cell, config)], site=settings)
        of_run = estimate.gpu_hours(config, steps=steps)
        per_step = measured.get(estimate_key(config))
        if of_run is not None:
            hours.append(of_run)
        elif per_step is not None and _trains_on_cpus(config, site):
            core_hours.append(per_step * steps)
        else:
            unknown += 1
    return ExpectedCost(
        runs=runs, gpu_hours=math.fsum(hours), core_hours=math.fsum(core_hours), unknown=unknown
    )


def _core_hours_per_step(experiment: Experiment) -> dict[str, float]:
    """Core-hours per step, starts and evaluations included, of runs completed on CPUs, by their size."""
    hours: dict[str, list[float]] = {}
    for run in experiment.runs:
        status = current_status(run)
        cost = cost_of_run(run, status) if status.state == State.COMPLETED else None
        if cost is None or cost.gpu_hours or not cost.core_hours:
            continue
        try:
            config = run.config()
        except DamagedError:
            continue
        hours.setdefault(estimate_key(config), []).append(cost.core_hours / config.train.steps)
    return {key: math.fsum(values) / len(values) for key, values in hours.items()}


def _trains_on_cpus(config: RunConfig, site: Site) -> bool:
    if config.site.device == "cpu" or site.run.get("device") == "cpu":
        return True
    return not (this_machine().gpus if site.scheduler == LOCAL else site.gpus_per_node)


def cost_line(cost: ExpectedCost) -> str:
    """What a launch is expected to cost, in a sentence; empty if that is known of no run."""
    parts = [f"{amount(cost.gpu_hours)} GPU-hours"] if cost.gpu_hours else []
    if cost.core_hours:
        parts.append(f"{amount(cost.core_hours)} core-hours (as completed runs of the same size took)")
    if not parts:
        return ""
    unknown = f"; unknown for {cost.unknown} of {cost.runs} runs" if cost.unknown else ""
    return f"Estimated cost: {' and '.join(parts)}{unknown}."


def question(cost: ExpectedCost, site: Site) -> str | None:
    """What to ask before a launch; None if the cost is known and within the site's bound."""
    if site.confirm_hours is None or cost.runs == 0:
        return None
    if cost.unknown:
        return (
            f"the cost of {cost.unknown} of {cost.runs} runs is unknown (run.gpu in {site.file} names the "
            f"GPUs), and confirm_hours is {site.confirm_hours}"
        )
    hours = max((cost.gpu_hours, "GPU-hours"), (cost.core_hours, "core-hours"))
    if hours[0] <= site.confirm_hours:
        return None
    return (
        f"{cost.runs} runs are expected to take {amount(hours[0])} {hours[1]} of training, and "
        f"confirm_hours in {site.file} is {site.confirm_hours}"
    )
