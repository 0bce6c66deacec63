"""Grouping runs into job arrays by shape, after checking each run's configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.experiment.matrix import ResolvedCell
from asyncpp_cli.experiment.run_data import config_to_train, naming_config
from asyncpp_cli.launch.common.options import LaunchOptions, Pauses, check_pause
from asyncpp_cli.runs.experiment_folder import Cell
from asyncpp_cli.runs.run_folder import FolderName, Run, RunId
from asyncpp_cli.runs.status import UNKNOWN, State, is_done
from asyncpp_cli.sites.profile import Site, seconds_of
from asyncpp_cli.sites.resources import ranks_of
from asyncpp_cli.slurm import client as slurm
from asyncpp_cli.slurm.run_status import RunStatus
from stages.config.records import Count, FileRecord, Record
from stages.config.run_config import RunConfig
from stages.resolve.checks import check


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run that will be a task of an array."""

    run: Run
    shape: JobShape
    steps: int
    until: int | None
    """Step after which it pauses; None: it trains to the end."""
    seconds: float | None
    """Expected time of the steps that are left; None: not known, or the site does not ask for it."""


@dataclass(frozen=True, kw_only=True)
class PlannedArray:
    """Runs of one shape that will be one array."""

    shape: JobShape
    runs: tuple[PlannedRun, ...]
    throttle: Throttle
    time: str
    """Time limit of each of its jobs, in sbatch's notation."""


def runs_to_submit(run_statuses: Sequence[RunStatus], options: LaunchOptions) -> list[Run]:
    """The runs that are neither done, nor running, nor queued, and can be read; those that failed last, so
    that they keep no other from its turn."""
    return [
        run_status.run
        for run_status in sorted(run_statuses, key=lambda each: each.status.state == State.FAILED)
        if (options.only is None or run_status.run.id in options.only)
        and not is_done(run_status.status, until=options.pauses.get(run_status.run.id))
        and not run_status.is_live
        and run_status.status.state not in UNKNOWN
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
        free_jobs: number of jobs that may be submitted; the last runs are left out. None: no limit.

    Raises:
        UserError: a run cannot be read, trained, or placed at this site.
    """
    planned = []
    seen: dict[str, Any] = {}
    configs = [_checked_config(run, site, seen) for run in runs]
    expected = _expected_seconds(runs, configs, site, pauses=options.pauses)
    for run, config, seconds in zip(runs, configs, expected, strict=True):
        shape = shape_of(config, site, replay=options.replay)
        check_pause(run, config, options.pauses)
        until = options.pauses.get(run.id)
        planned.append(
            PlannedRun(run=run, shape=shape, steps=config.train.steps, until=until, seconds=seconds)
        )
    largest = min(site.array_limit or max_array_size, max_array_size)
    by_shape, groups = attrgetter("shape"), []
    for shape, same_shape in groupby(sorted(planned[:free_jobs], key=by_shape), key=by_shape):
        group = tuple(same_shape)
        groups += [(shape, group[first : first + largest]) for first in range(0, len(group), largest)]
    at_once = options.max_parallel or site.max_parallel
    array_throttles = throttles([len(group) for _, group in groups], at_once=at_once)
    return [
        PlannedArray(shape=shape, runs=group, throttle=throttle, time=time_of(group, site))
        for (shape, group), throttle in zip(groups, array_throttles, strict=True)
    ]


def _expected_seconds(
    runs: Sequence[Run], configs: Sequence[RunConfig], site: Site, *, pauses: Pauses
) -> list[float | None]:
    """How long the rest of each run takes at a site that asks for it and whose GPUs are known."""
    if site.time_margin is None:
        return [None] * len(runs)
    from asyncpp_cli.planner.cells import expected

    cells = [
        ResolvedCell(Cell(id=run.id, axes={}), config) for run, config in zip(runs, configs, strict=True)
    ]
    left = [
        max(0, pauses.get(run.id, config.train.steps) - (run.saved_step or 0))
        for run, config in zip(runs, configs, strict=True)
    ]
    return [
        None if each.step_seconds is None else each.step_seconds * steps
        for each, steps in zip(expected(str(site.file), cells, site=site), left, strict=True)
    ]


def time_of(runs: Sequence[PlannedRun], site: Site) -> str:
    """Time limit of an array's jobs: that of its slowest run with the site's margin, at most the site's."""
    known = [run.seconds for run in runs if run.seconds is not None]
    if site.time_margin is None or len(known) < len(runs):
        return site.time
    minutes = math.ceil((site.time_margin * max(known) + _BESIDE_TRAINING + site.signal_lead) / 60)
    return str(minutes) if minutes * 60 < seconds_of(site.time) else site.time


_BESIDE_TRAINING = 15 * 60.0
"""Seconds to start, evaluate and save."""


def config_at(run: Run, site: Site, seen: dict[str, Any] | None = None) -> RunConfig:
    """The configuration of a run at a site, checked.

    Raises:
        UserError: the run cannot be read or trained.
    """
    with naming_config(run):
        config = config_to_train(run)
        config = replace(config, site=replace(config.site, **site.run))
        check(config, seen=seen)
    return config


def _checked_config(run: Run, site: Site, seen: dict[str, Any]) -> RunConfig:
    config = config_at(run, site, seen)
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


@dataclass(frozen=True, order=True, kw_only=True)
class JobShape:
    """Resources of a job. Each task is one rank, with one GPU if the site has any."""

    nodes: int
    tasks: int
    """Total number of tasks."""
    tasks_per_node: int
    """The last node has fewer if the tasks do not divide evenly."""
    cpus_per_task: int
    gpus_per_node: int

    def __str__(self) -> str:
        gpus = f", {self.gpus_per_node} GPUs per node" if self.gpus_per_node else ""
        cpus = _count(self.cpus_per_task, "CPU")
        return f"{_count(self.nodes, 'node')}, {_count(self.tasks, 'task')} of {cpus}{gpus}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shape_of(config: RunConfig, site: Site, *, replay: bool) -> JobShape:
    """Shape of a run's job at a site.

    Raises:
        UserError: the run does not fit the site's profile.
    """
    tasks = 1 if replay else ranks_of(config)
    cpus = site.cpus_per_task or config.site.threads
    with_gpus = site.gpus_per_node > 0 and config.site.device != "cpu"
    if config.site.device == "cuda" and not with_gpus:
        raise UserError(
            f"{site.file}: gpus_per_node: site.device is cuda, but this site has no GPUs; "
            "accepted: a number of GPUs here, or run: {device: cpu}"
        )
    if with_gpus and (config.site.runs_per_gpu or 1) > 1 and "gres" not in site.flags:
        raise UserError(
            f"{site.file}: flags: site.runs_per_gpu is {config.site.runs_per_gpu}, but a job's GPUs are its "
            'own; accepted: {gres: "shard:1"} where SLURM shares GPUs by shards, or run: {runs_per_gpu: 1}'
        )
    limits = [tasks]
    if with_gpus:
        limits.append(site.gpus_per_node)
    if site.cpus_per_node is not None:
        limits.append(site.cpus_per_node // cpus)
    if site.tasks_per_node is not None:
        limits.append(site.tasks_per_node)
    if min(limits) < 1:
        raise UserError(
            f"{site.file}: cpus_per_node: a rank takes {cpus} CPUs, and a node has {site.cpus_per_node}"
        )
    nodes = math.ceil(tasks / min(limits))
    if site.max_nodes is not None and nodes > site.max_nodes:
        raise UserError(f"{site.file}: max_nodes: {tasks} ranks take {nodes} nodes, not {site.max_nodes}")
    tasks_per_node = math.ceil(tasks / nodes)
    return JobShape(
        nodes=nodes,
        tasks=tasks,
        tasks_per_node=tasks_per_node,
        cpus_per_task=cpus,
        gpus_per_node=tasks_per_node if with_gpus else 0,
    )


def site_settings_of(shape: JobShape, site: Site) -> dict[str, Any]:
    """Settings `site.*` that override those of runs in jobs of a shape.

    With GPUs the device is `cuda`: `auto` would train on the CPUs of a node whose driver has failed.
    """
    return site.run | ({"device": "cuda"} if shape.gpus_per_node else {})


@dataclass(frozen=True)
class Throttle:
    """When an array may start, and how many of its tasks may run at the same time."""

    at_once: int
    """Number of its tasks that may run at the same time."""
    after: int | None = None
    """Index of the array that must have ended first; smaller than its own."""


def throttles(sizes: Sequence[int], *, at_once: int | None) -> list[Throttle]:
    """The throttle of each array.

    SLURM throttles the tasks of one array (`--array=0-9%3`), not of several together. If there are no more
    arrays than runs allowed, each array gets a share of the limit. If there are more, an array starts when
    the one before it has ended.

    Args:
        sizes: number of tasks of each array.
        at_once: number of tasks of all arrays that may run at the same time; None: no limit.
    """
    if at_once is None or at_once >= sum(sizes):
        return [Throttle(size) for size in sizes]
    if at_once >= len(sizes):
        return [Throttle(share) for share in _shares(sizes, at_once)]
    return [
        Throttle(min(size, at_once), after=index - 1 if index else None) for index, size in enumerate(sizes)
    ]


def _shares(sizes: Sequence[int], total: int) -> list[int]:
    """Divide `total` slots among arrays, at least one each, roughly in proportion to their sizes."""
    shares = [1] * len(sizes)
    for _ in range(total - len(sizes)):
        most = max(range(len(sizes)), key=lambda index: sizes[index] / shares[index])
        shares[most] += 1
    return shares


class ManifestRow(Record, frozen=True, kw_only=True):
    """A run of an array."""

    id: RunId
    config_sha256: str
    steps: Count
    until: Count | None = None
    """Step after which it pauses; None: it trains to the end."""


class ArrayManifest(FileRecord, frozen=True, kw_only=True):
    """Content of array-K.json, read by the array's tasks when they start."""

    name: str
    """Job name."""
    submission: FolderName
    cluster: str
    replay: bool
    retries: int
    signal_lead: int
    network_interface: str | None
    srun_flags: list[str]
    site_settings: dict[str, Any]
    code: str
    """`snapshot.code_hash` of the code to run."""
    software: dict[str, str]
    shape: JobShape
    rows: list[ManifestRow]
    """Runs by array index."""
    command_prefix: str = ""
    python: str | None = None
