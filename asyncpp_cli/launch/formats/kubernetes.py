"""Indexed Jobs of Kubernetes: one Job per run, one pod per rank (`batch/v1`, Kubernetes 1.31 or later).

Rank 0 leaves its address in the run's folder, so no Service is needed. A pod that exits with code 75 has
saved and is started again without counting as a failure, as one whose node is drained; one that exits with
code 2 is refused, and trying again would not help.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from asyncpp_cli.errors import UserError
from asyncpp_cli.launch.formats.described import DescribedRun
from asyncpp_cli.sites.profile import Site
from stages.liveness.stop_signal import RESUMABLE

_MISUSED = 2
"""Exit code of a user's mistake."""


def to_kubernetes(runs: Sequence[DescribedRun], site: Site, retries: int) -> str:
    """Manifests of the runs, as one YAML stream.

    Raises:
        UserError: the profile has no image, or no volume that holds the runs and their data.
    """
    if site.container is None or site.container.runtime != "kubernetes":
        raise UserError(
            f"{site.file}: container: --print kubernetes needs an image and a volume; accepted: "
            "{runtime: kubernetes, image: NAME:TAG, mounts: ['CLAIM:/folder']}"
        )
    volumes = [mount.split(":") for mount in site.container.mounts]
    for run in runs:
        for path in filter(None, (run.folder, run.data)):
            if not any(PurePosixPath(path).is_relative_to(volume[1]) for volume in volumes):
                raise UserError(
                    f"{site.file}: container.mounts: none holds {path}; accepted: CLAIM:/folder, where "
                    "CLAIM is a PersistentVolumeClaim and /folder the path that it has here, too"
                )
    manifests = [_job(run, site, volumes, retries) for run in runs]
    return yaml.safe_dump_all(manifests, sort_keys=False, width=10_000).rstrip()


def job_name(run_id: str, folder: str) -> str:
    """A DNS label for a run's Job: at most 49 characters, so that names of its pods are labels, too."""
    readable = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")
    digest = hashlib.sha256(folder.encode()).hexdigest()[:8]
    return f"{readable[:40].strip('-') or 'run'}-{digest}"


def _job(run: DescribedRun, site: Site, volumes: Sequence[Sequence[str]], retries: int) -> dict[str, Any]:
    assert site.container is not None
    shape = run.shape
    limits = {"cpu": str(shape.cpus_per_task)}
    if shape.gpus_per_node:
        limits["nvidia.com/gpu"] = "1"
    if run.memory:
        limits["memory"] = _memory_per_rank(run.memory, shape.tasks_per_node)
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


def _memory_per_rank(per_node: str, ranks: int) -> str:
    """Kubernetes' notation of a rank's share of sbatch's `64G`, which counts MiB where there is no unit."""
    mebibytes = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
    unit = per_node[-1] if per_node[-1] in mebibytes else "M"
    return f"{max(1, int(int(per_node.rstrip('KMGT')) * mebibytes[unit] / ranks))}Mi"
