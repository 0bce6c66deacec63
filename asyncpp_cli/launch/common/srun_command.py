"""The srun command that starts the ranks of a job."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncpp_cli.experiment.run_data import config_to_train
from asyncpp_cli.launch.common.arrays import JobShape
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.sites.containers import Container, container_words, mounts_of


def srun_command(
    run: Run,
    *,
    attempt: int,
    shape: JobShape,
    site_settings: Mapping[str, Any],
    srun_flags: Sequence[str],
    container: Container | None,
    work_folder: Path,
    environment: Mapping[str, str],
) -> list[str]:
    """The command, as words.

    Args:
        run: the run.
        attempt: number of the attempt.
        shape: resources of the job.
        site_settings: settings `site.*` that override the run's.
        srun_flags: additional flags of srun.
        container: container of the ranks; None: they run on the node.
        work_folder: folder of the submission, where the job runs.
        environment: variables of the command.

    Raises:
        DamagedError: the run's configuration cannot be read.
        ContainerError: a path of the run cannot be mounted.
    """
    config = config_to_train(run)
    site = replace(config.site, **site_settings)
    flags: list[str] = []
    python = [sys.executable]
    if container is not None:
        flags, python = container_words(
            container,
            mounts_of(container, work_folder.parents[1], config),
            work_folder=work_folder,
            gpus=shape.gpus_per_node > 0,
            environment=environment,
        )
    return [
        "srun",
        f"--ntasks={shape.tasks}",
        f"--cpus-per-task={shape.cpus_per_task}",
        # Ends the other ranks, should they not notice by themselves that one is gone.
        "--kill-on-bad-exit=1",
        f"--wait={round(site.grace) + 60}",
        "--export=ALL",
        "--unbuffered",
        *srun_flags,
        *flags,
        *[*python, "-P", "-m", "asyncpp_cli.launch.common.supervisor"],
        *[str(run.folder), str(attempt)],
    ]


def network_variables(interface: str | None) -> dict[str, str]:
    """Variables that choose the network interface of gloo and NCCL; None: their own choice."""
    if interface is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
