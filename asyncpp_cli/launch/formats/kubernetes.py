"""Indexed Jobs of Kubernetes: one Job per run, one pod per rank (`batch/v1`, Kubernetes 1.31 or later).

Rank 0 leaves its address in the run's folder, so no Service is needed. A pod that exits with code 75 has
saved and is started again without counting as a failure, as one whose node is drained; one that exits with
code 2 is refused, and trying again would not help.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import yaml

from asyncpp_cli.launch.formats.described import DescribedRun, claims_of, job_name, mebibytes
from asyncpp_cli.sites.profile import Site
from stages.liveness.stop_signal import RESUMABLE

_MISUSED = 2
"""Exit code of a user's mistake."""


def to_kubernetes(runs: Sequence[DescribedRun], site: Site, retries: int) -> str:
    """Manifests of the runs, as one YAML stream.

    Raises:
        UserError: the profile has no image, or no volume that holds the runs and their data.
    """
    volumes = claims_of(site, runs, accepted_by="kubernetes")
    manifests = [_job(run, site, volumes, retries) for run in runs]
    return yaml.safe_dump_all(manifests, sort_keys=False, width=10_000).rstrip()


def _job(run: DescribedRun, site: Site, volumes: Sequence[Sequence[str]], retries: int) -> dict[str, Any]:
    assert site.container is not None
    shape = run.shape
    limits = {"cpu": str(shape.cpus_per_task)}
    if shape.gpus_per_node:
        limits["nvidia.com/gpu"] = "1"
    if run.memory:
        limits["memory"] = f"{max(1, int(mebibytes(run.memory) / shape.tasks_per_node))}Mi"
    mounts = [
        {
            "name": f"volume-{index}",
            "mountPath": volume[1],
            **({"readOnly": True} if "ro" in volume[2:] else {}),
        }
        for index, volume in enumerate(volumes)
    ]
    container = {
        "name": "rank",
        "image": site.container.image,
        # Kubernetes expands $(NAME) in a command; $$ stands for a dollar.
        "command": [word.replace("$", "$$") for word in run.rank_command],
        "env": [
            {"name": name, "value": str(value)}
            for name, value in {"PYTHONUNBUFFERED": "1", **site.environment}.items()
        ],
        "resources": {"requests": dict(limits), "limits": limits},
        "volumeMounts": [*mounts, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    policy = [
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [RESUMABLE]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [_MISUSED]}},
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job_name(run.id, run.folder), "annotations": {"asyncpp/run": run.folder}},
        "spec": {
            "completionMode": "Indexed",
            "completions": shape.tasks,
            "parallelism": shape.tasks,
            # A rank that fails ends the others, and each pod counts.
            "backoffLimit": retries * shape.tasks,
            "podFailurePolicy": {"rules": policy},
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": math.ceil(run.grace) + 10,
                    "containers": [container],
                    "volumes": [
                        *(
                            {"name": f"volume-{index}", "persistentVolumeClaim": {"claimName": volume[0]}}
                            for index, volume in enumerate(volumes)
                        ),
                        {"name": "shm", "emptyDir": {"medium": "Memory"}},
                    ],
                }
            },
        },
    }
