"""The resources of a job: nodes, tasks, CPUs and GPUs. Runs of the same shape share an array."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from asyncpp_cli.errors import UserError
from asyncpp_cli.launch.resources import ranks_of
from asyncpp_cli.launch.sites import Site
from stages.config import RunConfig


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
