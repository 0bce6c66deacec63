"""Tasks of SkyPilot, one per run: its nodes meet as torchrun's agents, by the addresses that SkyPilot sets.

Written for SkyPilot 0.14 (its "SkyPilot YAML" reference, and "Distributed jobs" for the variables). As a
managed job a run whose machines are preempted is started again on others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import yaml

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.launch.formats.described import DescribedRun, claims_of, job_name, mebibytes
from asyncpp_cli.sites.profile import Site
from stages.liveness.stop_signal import RESUMABLE

_MIB_PER_GB = 10**9 / 2**20


def to_skypilot(runs: Sequence[DescribedRun], site: Site, retries: int) -> str:
    """Tasks of the runs, as one YAML stream.

    Raises:
        UserError: the profile does not name its GPUs, or no volume holds the runs and their data.
    """
    tasks = [_task(run, site, retries) for run in runs]
    return yaml.safe_dump_all(tasks, sort_keys=False, width=10_000).rstrip()


def _task(run: DescribedRun, site: Site, retries: int) -> dict[str, Any]:
    shape = run.shape
    resources: dict[str, Any] = {"cpus": f"{shape.tasks_per_node * shape.cpus_per_task}+"}
    if run.memory:
        resources["memory"] = f"{math.ceil(mebibytes(run.memory) / _MIB_PER_GB)}+"
    if shape.gpus_per_node:
        if site.gpu_type is None:
            raise UserError(
                f"{site.file}: gpu_type: --print skypilot needs the name of the GPUs; accepted: H100, L4, ..."
            )
        resources["accelerators"] = f"{site.gpu_type}:{shape.gpus_per_node}"
    # A run of several ranks ends with torchrun's own exit code.
    resources["job_recovery"] = {"max_restarts_on_errors": retries, "recover_on_exit_codes": [RESUMABLE]}
    task = {
        # Names begin with a letter.
        "name": f"run-{job_name(run.id, run.folder)}",
        "num_nodes": shape.nodes,
        "resources": resources,
        "envs": {name: str(value) for name, value in {"PYTHONUNBUFFERED": "1", **site.environment}.items()},
    }
    if site.container is not None:
        volumes = claims_of(site, [run], accepted_by="skypilot")
        resources["image_id"] = f"docker:{site.container.image}"
        task["volumes"] = {volume[1]: volume[0] for volume in volumes}
    return task | {"run": "\n".join([*site.setup, *_commands(run)])}


def _commands(run: DescribedRun) -> list[str]:
    """Lines of a shell that start the ranks of the node on which they are read."""
    if run.shape.nodes == 1:
        return list(run.node_commands)
    cases = [f"{node}) {command} ;;" for node, command in enumerate(run.node_commands)]
    return [
        'HOST=$(printf "%s\\n" "$SKYPILOT_NODE_IPS" | head -n 1)',
        'case "$SKYPILOT_NODE_RANK" in',
        *(case.replace("--master-addr HOST", '--master-addr "$HOST"') for case in cases),
        "esac",
    ]
