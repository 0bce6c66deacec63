"""How long a launch is expected to take on this machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from asyncpp_cli.launch.local_machine import Task
from asyncpp_cli.planner.here import are_long, said_of_all, seconds_here, together
from asyncpp_cli.sites.resources import Machine, this_machine
from stages.config.run_config import RunConfig


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
