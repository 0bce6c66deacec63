"""What a run asks of a cluster: nodes, tasks, CPUs and GPUs. Runs that ask for the same share an array."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from asyncpp_cli.cluster.resources import ranks_of
from asyncpp_cli.cluster.sites import Site
from asyncpp_cli.errors import UserError
from stages.config import RunConfig


@dataclass(frozen=True, order=True, kw_only=True)
class Shape:
    """Resources of a job. One task is one rank, on one GPU where there are any."""

    nodes: int
    tasks: int
    """In all."""
    tasks_per_node: int
    """At most; where the tasks do not divide evenly, the last node has fewer."""
    cpus_per_task: int
    gpus_per_node: int

    def __str__(self) -> str:
        gpus = f", {self.gpus_per_node} GPUs a node" if self.gpus_per_node else ""
        cpus = _count(self.cpus_per_task, "CPU")
        return f"{_count(self.nodes, 'node')}, {_count(self.tasks, 'task')} of {cpus}{gpus}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shape_of(config: RunConfig, site: Site, *, replay: bool) -> Shape:
    """What a run takes at a site.

    Raises:
        UserError: the site's profile has no room for it.
    """
    tasks = 1 if replay else ranks_of(config)
    cpus = site.cpus_per_task or config.site.threads
    with_gpus = site.gpus_per_node > 0 and config.site.device != "cpu"
    if config.site.device == "cuda" and not with_gpus:
        raise UserError(
            f"{site.file}: gpus_per_node: site.device is cuda, but this site has no GPUs; "
            "accepted: a number of GPUs here, or run: {device: cpu}"
        )
    at_most = [tasks]
    if with_gpus:
        at_most.append(site.gpus_per_node)
    if site.cpus_per_node is not None:
        at_most.append(site.cpus_per_node // cpus)
    if site.tasks_per_node is not None:
        at_most.append(site.tasks_per_node)
    if min(at_most) < 1:
        raise UserError(
            f"{site.file}: cpus_per_node: a rank takes {cpus} CPUs, and a node has {site.cpus_per_node}"
        )
    nodes = math.ceil(tasks / min(at_most))
    if site.max_nodes is not None and nodes > site.max_nodes:
        raise UserError(f"{site.file}: max_nodes: {tasks} ranks take {nodes} nodes, not {site.max_nodes}")
    tasks_per_node = math.ceil(tasks / nodes)
    return Shape(
        nodes=nodes,
        tasks=tasks,
        tasks_per_node=tasks_per_node,
        cpus_per_task=cpus,
        gpus_per_node=tasks_per_node if with_gpus else 0,
    )


def settings_of(shape: Shape, site: Site) -> dict[str, Any]:
    """The settings `site.*` of runs in jobs of a shape, instead of their own.

    One that was given GPUs is to use them: `auto` would train on the CPUs of a node whose driver has failed.
    """
    return site.run | ({"device": "cuda"} if shape.gpus_per_node else {})
