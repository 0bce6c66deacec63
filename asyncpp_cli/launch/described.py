"""What another scheduler needs to know of the runs that are not completed. Nothing is claimed."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.launch.common.arrays import JobShape, config_at, shape_of
from asyncpp_cli.launch.common.supervisor import train_words
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.status import State
from asyncpp_cli.sites.profile import LOCAL, Site
from asyncpp_cli.sites.resources import this_machine
from stages.config.keys import unknown
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
    seen: dict[str, Any] = {}
    return [
        _described(run.id, str(run.folder.absolute()), config_at(run, site, seen), site, replay=replay)
        for run in runs
    ]


def _described(run_id: str, folder: str, config: RunConfig, site: Site, *, replay: bool) -> DescribedRun:
    shape = shape_of(config, site, replay=replay)
    python = [*shlex.split(site.command_prefix), site.python or sys.executable]
    train = train_words(folder, replay=replay)
    return DescribedRun(
        id=run_id,
        folder=folder,
        data=config.data.path,
        sources=tuple(config.data.sources.values()),
        shape=shape,
        memory=site.memory,
        time=None if site.scheduler == LOCAL else site.time,
        grace=config.site.grace,
        node_commands=tuple(
            shlex.join([*python, *_torchrun(shape, node), *train]) for node in range(shape.nodes)
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


def printed(form: str, runs: Sequence[DescribedRun]) -> str:
    """The runs as `commands`, with comments for a shell, or as `json`.

    Raises:
        UserError: there is no such form.
    """
    if form == "json":
        return json.dumps([asdict(run) for run in runs], indent=1)
    if form != "commands":
        raise UserError(f"--print: {unknown(form, ('sbatch', 'commands', 'json'))}")
    lines = []
    for run in runs:
        limits = [f"{run.memory} per node"] if run.memory else []
        limits += [f"at most {run.time}"] if run.time else []
        lines += [f"# {run.id}: {', '.join([str(run.shape), *limits])}", *run.node_commands]
    return "\n".join(lines)
