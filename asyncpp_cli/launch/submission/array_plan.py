"""Grouping runs into job arrays by shape, after checking each run's configuration."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from asyncpp_cli.errors import DamagedError, UserError
from asyncpp_cli.experiment.run_data import config_to_train
from asyncpp_cli.launch.containers import ContainerError, mounts_of
from asyncpp_cli.launch.pauses import Pauses, check_pause
from asyncpp_cli.launch.sites import Site
from asyncpp_cli.launch.slurm import client as slurm
from asyncpp_cli.launch.slurm.run_status import RunStatus
from asyncpp_cli.launch.submission.job_shape import JobShape, shape_of
from asyncpp_cli.launch.submission.throttle import Throttle, throttles
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, is_done
from stages.config import RunConfig
from stages.validation import ConfigError, check


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options of a launch on a cluster; they override the site profile."""

    replay: bool
    max_parallel: int | None
    retries: int | None
    report: bool
    tell_end: bool = False
    """Add a job that runs the site's `on_end`."""
    pauses: Pauses = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run that will be a task of an array."""

    run: Run
    shape: JobShape
    steps: int
    until: int | None
    """Step after which it pauses; None: it trains to the end."""


@dataclass(frozen=True, kw_only=True)
class PlannedArray:
    """Runs of one shape that will be one array."""

    shape: JobShape
    runs: tuple[PlannedRun, ...]
    throttle: Throttle


def runs_to_submit(
    run_statuses: Sequence[RunStatus], *, only: Collection[str] | None, pauses: Pauses
) -> list[Run]:
    """The runs that are neither done, nor running, nor queued."""
    return [
        run_status.run
        for run_status in run_statuses
        if (only is None or run_status.run.id in only)
        and run_status.status.state != State.RUNNING
        and not is_done(run_status.status, until=pauses.get(run_status.run.id))
        and not run_status.has_job
    ]


def plan_arrays(
    runs: Sequence[Run],
    site: Site,
    options: LaunchOptions,
    *,
    max_array_size: int,
    free_jobs: int | None = None,
) -> list[PlannedArray]:
    """The arrays to submit, with each run's configuration checked.

    Args:
        runs: runs to submit.
        site: site profile.
        options: options of the launch.
        max_array_size: SLURM's limit on the tasks of an array.
        free_jobs: number of jobs that may be submitted; further runs are left out. None: no limit.

    Raises:
        UserError: a run cannot be read, trained, or placed at this site.
    """
    planned = []
    seen: dict[tuple[Any, ...], Any] = {}
    for run in runs:
        config = _checked_config(run, site, seen)
        shape = shape_of(config, site, replay=options.replay)
        check_pause(run, config, options.pauses)
        until = options.pauses.get(run.id)
        planned.append(PlannedRun(run=run, shape=shape, steps=config.train.steps, until=until))
    largest = array_size(site, max_array_size)
    groups = []
    for shape, same_shape in groupby(sorted(planned, key=_shape)[:free_jobs], key=_shape):
        group = tuple(same_shape)
        groups += [(shape, group[first : first + largest]) for first in range(0, len(group), largest)]
    at_once = options.max_parallel or site.max_parallel
    array_throttles = throttles([len(group) for _, group in groups], at_once=at_once)
    return [
        PlannedArray(shape=shape, runs=group, throttle=throttle)
        for (shape, group), throttle in zip(groups, array_throttles, strict=True)
    ]


def array_size(site: Site, max_array_size: int) -> int:
    """Largest number of tasks per array at a site, given SLURM's limit."""
    return min(site.array_limit or max_array_size, max_array_size)


def _shape(planned: PlannedRun) -> JobShape:
    return planned.shape


def _checked_config(run: Run, site: Site, seen: dict[tuple[Any, ...], Any]) -> RunConfig:
    try:
        config = config_to_train(run)
        config.site = replace(config.site, **site.run)
        check(config, seen=seen)
    except DamagedError as error:
        raise UserError(str(error)) from error
    except ConfigError as error:
        raise UserError(f"{run.config_file}: {error.key}: {error.message}") from error
    if site.container is not None:
        try:
            mounts_of(site.container, run.folder.absolute().parents[1], config)
        except ContainerError as error:
            raise UserError(f"{site.file}: container.{error.key}: {error.message}") from None
    if site.signal_lead < config.site.grace + 10:
        raise UserError(
            f"{site.file}: signal_lead: {site.signal_lead} s are too few for a run that may take "
            f"{config.site.grace:g} s to save; accepted: {config.site.grace + 10:g} or more, or run.grace"
        )
    return config


def free_jobs(site: Site) -> int | None:
    """Number of jobs that this user may still submit at the site; None if the profile has no limit.

    Raises:
        SlurmError: SLURM does not answer.
    """
    return None if site.submit_limit is None else max(0, site.submit_limit - slurm.user_job_count())
