"""What another scheduler needs to know of the runs that are not completed. Nothing is claimed."""

from __future__ import annotations

import hashlib
import re
import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.launch.common.arrays import JobShape, config_at, shape_of
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.status import State
from asyncpp_cli.sites.profile import LOCAL, Site
from asyncpp_cli.sites.resources import this_machine
from stages.config.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class DescribedRun:
    """A run that is to be started."""

    id: str
    folder: str
    """Absolute path, the same on all machines."""
    data: str | None
    """Absolute path of the data; None: the text that comes with Python, or a mixture."""
    sources: tuple[str, ...]
    """Those of a mixture's sources."""
    shape: JobShape
    memory: str | None
    """Memory per node in sbatch's notation (`64G`); None if the site does not tell."""
    time: str | None
    """Time limit in sbatch's notation; None on a site without one."""
    grace: float
    """Seconds that the run may take to save."""
    rank_command: tuple[str, ...]
    """Command of each rank."""
    node_commands: tuple[str, ...]
    """Command of each node, for a shell; HOST stands for the first node."""


def described_runs(
    experiment: Experiment, site: Site, *, only: Collection[str] | None, replay: bool
) -> list[DescribedRun]:
    """The runs that are neither completed nor running.

    Raises:
        UserError: a run cannot be read, trained, or placed at the site.
    """
    if site.scheduler == LOCAL:
        site = replace(site, gpus_per_node=len(this_machine().gpus))
    runs = [
        run
        for run in experiment.runs_to_launch
        if (only is None or run.id in only)
        and current_status(run).state not in (State.COMPLETED, State.RUNNING)
    ]
    return [
        _described(run.id, str(run.folder.absolute()), config_at(run, site), site, replay=replay)
        for run in runs
    ]


def _described(run_id: str, folder: str, config: RunConfig, site: Site, *, replay: bool) -> DescribedRun:
    shape = shape_of(config, site, replay=replay)
    python = sys.executable if site.container is None else site.container.python
    train = ("-m", "asyncpp_cli", "train", folder, *(["--replay"] if replay else []))
    return DescribedRun(
        id=run_id,
        folder=folder,
        data=config.data.path,
        sources=tuple(config.data.sources.values()),
        shape=shape,
        memory=site.memory,
        time=None if site.scheduler == LOCAL else site.time,
        grace=config.site.grace,
        rank_command=(python, *train),
        node_commands=tuple(
            shlex.join([python, *_torchrun(shape, node), *train]) for node in range(shape.nodes)
        ),
    )


def _torchrun(shape: JobShape, node: int) -> list[str]:
    """torchrun's own words; none for a run of one process."""
    if shape.tasks == 1:
        return []
    here = min(shape.tasks_per_node, shape.tasks - node * shape.tasks_per_node)
    words = ["-m", "torch.distributed.run", "--nproc-per-node", str(here)]
    if shape.nodes == 1:
        return [*words, "--standalone"]  # on a free port, so that a machine takes several runs
    return [*words, "--nnodes", str(shape.nodes), "--node-rank", str(node), "--master-addr", "HOST"]


def mebibytes(memory: str) -> float:
    """An amount in sbatch's notation, which counts MiB where there is no unit."""
    units = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
    return int(memory.rstrip("KMGT")) * units.get(memory[-1], 1)


def claims_of(site: Site, runs: Sequence[DescribedRun], *, accepted_by: str) -> list[list[str]]:
    """Claim, folder and perhaps `ro` of each volume.

    Raises:
        UserError: the profile has no image for pods, or no volume that holds the runs and their data.
    """
    if site.container is None or site.container.runtime != "kubernetes":
        raise UserError(
            f"{site.file}: container: --print {accepted_by} needs an image and a volume; accepted: "
            "{runtime: kubernetes, image: NAME:TAG, mounts: ['CLAIM:/folder']}"
        )
    volumes = [mount.split(":") for mount in site.container.mounts]
    for run in runs:
        for path in filter(None, (run.folder, run.data, *run.sources)):
            if not any(PurePosixPath(path).is_relative_to(volume[1]) for volume in volumes):
                raise UserError(
                    f"{site.file}: container.mounts: none holds {path}; accepted: CLAIM:/folder, where "
                    "CLAIM is a PersistentVolumeClaim and /folder the path that it has here, too"
                )
    return volumes


def job_name(run_id: str, folder: str) -> str:
    """A DNS label of at most 49 characters for a run's job, so that names of its pods are labels, too."""
    readable = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")
    digest = hashlib.sha256(folder.encode()).hexdigest()[:8]
    return f"{readable[:40].strip('-') or 'run'}-{digest}"
