"""What sbatch refuses, in terms of what a person can change: the keys of the site profile."""

from __future__ import annotations

import re

_KEYS = (
    ("partition", ("partition",)),
    ("qos", ("qos",)),
    ("account|association", ("account", "qos")),
    ("job ?array|array (index|size|spec)|invalid job array", ("array_limit",)),
    ("submit limit|maxsubmit|job limit|maxjobs|too many jobs", ("submit_limit",)),
    ("time limit|timelimit|invalid time", ("time",)),
    ("memory", ("memory",)),
    ("gres|gpu", ("gpus_per_node", "gpu_type")),
    ("feature|constraint", ("constraint",)),
    ("licen[sc]e", ("flags",)),
    ("reservation", ("flags",)),
    ("node name", ("exclude",)),
    ("node count", ("max_nodes", "tasks_per_node", "partition")),
    ("cpu count|cpus per|more processors", ("cpus_per_task", "cpus_per_node", "tasks_per_node")),
    (
        "node configuration|not available",
        ("cpus_per_task", "cpus_per_node", "tasks_per_node", "gpus_per_node", "memory", "constraint"),
    ),
    ("unrecognized option|invalid option|ambiguous", ("flags", "remove_flags")),
    ("dependency", ("flags",)),
)
"""Words of SLURM's messages, and the keys that have to do with them; the first that fit."""


def keys_of(message: str) -> str:
    """The keys of a profile that a refusal has to do with, for people.

    Args:
        message: SLURM's own.
    """
    for words, keys in _KEYS:
        if re.search(words, message, re.IGNORECASE):
            return ", ".join(keys)
    return "partition, account, qos, time, memory, flags"
