"""Mapping sbatch's error messages to the keys of the site profile that may be the cause."""

from __future__ import annotations

import re

_KEYS = (
    ("maxsubmit|maxjobs|too many jobs", ("submit_limit",)),
    ("maxwall", ("time", "qos")),
    ("invalid account|association", ("account", "partition", "qos")),
    # After SLURM's name of the limit that is violated, where it gives one.
    ("accounting/qos policy", ("submit_limit", "qos", "account", "time")),
    ("partition", ("partition",)),
    ("qos", ("qos",)),
    ("account", ("account", "qos")),
    ("job ?array|array (index|size|spec)|invalid job array", ("array_limit",)),
    ("submit limit|job limit", ("submit_limit",)),
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
"""Patterns of SLURM's messages with the keys concerned; the first match counts."""


def profile_keys(message: str) -> str:
    """The keys of a site profile that may be the cause of a refusal, comma-separated.

    Args:
        message: SLURM's message.
    """
    for words, keys in _KEYS:
        if re.search(words, message, re.IGNORECASE):
            return ", ".join(keys)
    return "partition, account, qos, time, memory, flags"
