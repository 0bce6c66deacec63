"""Nodes on which runs fail before they begin to train; later jobs leave them out.

    EXPERIMENT/bad-nodes/NODE.json   which runs, and when

A node with two such runs is excluded for a day, and the second one does not use up a retry for it. The number
of excluded nodes is limited: an error of the runs' own would move from node to node.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from asyncpp_cli.base.atomic_files import write_record
from asyncpp_cli.base.errors import DamagedError
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import Job, RankEnd, RankStart
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.slurm import client as slurm
from asyncpp_cli.slurm.client import SlurmError, rows, run_command
from stages.config.records import FileRecord, read_record
from stages.rows import Start

if TYPE_CHECKING:
    from asyncpp_cli.launch.common.arrays import ArrayManifest
    from asyncpp_cli.sites.profile import Site

EXCLUSION_SECONDS = 24 * 3600.0
"""Time for which a bad node is excluded; it may be repaired by then."""
_RUNS = 2
"""Runs that did not begin to train on a node that is excluded."""
_NODES_PER_EXCLUDED = 4
"""At most one node in this many is excluded, but always one."""


class BadNode(FileRecord, frozen=True, kw_only=True):
    """Content of a node's file."""

    node: str
    """SLURM's name."""
    cluster: str
    runs: tuple[str, ...]
    """Ids of those that did not begin to train there."""
    time: float
    """Of the last of them, seconds since 1970."""


def failed_start(experiment: Experiment, attempt: Attempt, manifest: ArrayManifest, job: Job) -> str:
    """Count an attempt that has failed against its nodes, if it had not begun to train.

    Returns:
        Which nodes are excluded from now on because of it; empty if none is.
    """
    if any(isinstance(row, Start) and row.attempt == attempt.number for row in attempt.run.rows()):
        return ""
    before = excluded_here(experiment, manifest)
    ends = attempt.by_rank(RankEnd).items()
    failed = [attempt.read(RankStart, rank) for rank, end in ends if end.code != 0 and not end.stopped]
    nodes = {start.node for start in failed if start is not None and start.node}
    for node in nodes or ({job.nodes} if manifest.shape.nodes == 1 else set()):
        known = _recent(_file(experiment, node), job.cluster)
        runs = dict.fromkeys((*(known.runs if known else ()), attempt.run.id))
        bad = BadNode(node=node, cluster=job.cluster, runs=tuple(runs), time=time.time())
        # If it cannot be recorded (full disk), the failure counts as the run's.
        with suppress(OSError):
            _folder(experiment).mkdir(exist_ok=True)
            write_record(_file(experiment, node), bad)
    new = set(excluded_here(experiment, manifest).split(",")) - set(before.split(","))
    named = ", ".join(sorted(new))
    return f"{_RUNS} runs did not begin to train on {named}: excluded from now on" if new else ""


def _recent(file: Path, cluster: str | None) -> BadNode | None:
    """What a node's file says; None without one of the last day, of this cluster if one is given."""
    with suppress(OSError, DamagedError):
        bad = read_record(file, BadNode)
        if time.time() - bad.time < EXCLUSION_SECONDS and cluster in (None, bad.cluster):
            return bad
    return None


def recent_bad_nodes(experiment: Experiment, *, cluster: str | None = None) -> list[BadNode]:
    """Bad nodes of the last day, the earliest first.

    Args:
        experiment: the experiment.
        cluster: only nodes of this cluster; None: of all.
    """
    known = (_recent(file, cluster) for file in _folder(experiment).glob("*.json"))
    bad = [each for each in known if each is not None and len(each.runs) >= _RUNS]
    return sorted(bad, key=lambda each: (each.time, each.node))


def excludable(bad: Sequence[BadNode], nodes: Collection[str], *, needed: int) -> list[str]:
    """Names of the bad nodes that can be excluded, sorted.

    Args:
        bad: bad nodes, the earliest first; the latest are dropped if there are too many.
        nodes: usable nodes of the partition.
        needed: nodes per job.
    """
    most = min(max(1, len(nodes) // _NODES_PER_EXCLUDED), len(nodes) - needed)
    # SLURM refuses a job that excludes a node the cluster does not have.
    existing = [each.node for each in bad if each.node in nodes]
    return sorted(existing[: max(0, most)])


def exclusion_notes(experiment: Experiment) -> list[str]:
    """One line for each excluded node."""
    return [
        f"Node {bad.node} is excluded from new attempts until "
        f"{time.strftime('%F %H:%M', time.localtime(bad.time + EXCLUSION_SECONDS))}: these did not begin to "
        f"train there: {', '.join(bad.runs)}. To use it sooner: rm {_file(experiment, bad.node)}"
        for bad in recent_bad_nodes(experiment)
    ]


def _folder(experiment: Experiment) -> Path:
    return experiment.folder / "bad-nodes"


def _file(experiment: Experiment, node: str) -> Path:
    return _folder(experiment) / f"{node}.json"


def broken_nodes(nodes: str) -> str:
    """Which nodes are down, failing or not responding, with their states; empty for none, or if SLURM does
    not answer.

    Args:
        nodes: list in SLURM's notation: `n[1-2]`.
    """
    if not nodes:
        return ""
    try:
        states = sorted(rows(["sinfo", "--all", "-h", "-N", f"--nodes={nodes}", "-o", "%N|%T"], fields=2))
    except SlurmError:
        return ""
    broken = {name: state for name, state in states if state.startswith(("down", "fail")) or "*" in state}
    return ", ".join(f"node {node} is {state}" for node, state in broken.items())


def set_excluded(job_id: str, nodes: str) -> None:
    """Set the nodes that a pending job, or the pending tasks of an array, must not use.

    Args:
        job_id: id of the job or array.
        nodes: nodes to exclude; replaces earlier ones.

    Raises:
        SlurmError: SLURM refuses, for instance because the job is not pending.
    """
    run_command(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={nodes}"])


def excluded_nodes(
    experiment: Experiment, *, cluster: str, partition: str | None, needed: int, always: str
) -> str:
    """The nodes to exclude from a job, in SLURM's notation; empty for none.

    Args:
        experiment: the experiment.
        cluster: SLURM's name of the cluster.
        partition: the job's, or several (`a,b`); None: the default one, which `sinfo` marks with a star.
        needed: number of nodes of the job.
        always: nodes that the site profile excludes.
    """
    bad = recent_bad_nodes(experiment, cluster=cluster)
    if not bad:
        return always
    try:
        usable = {
            node
            for node, name in rows(["sinfo", "--all", "-h", "-N", "-o", "%N|%P"], fields=2)
            if (name.rstrip("*") in partition.split(",") if partition else name.endswith("*"))
        }
        if always:
            usable -= set(run_command(["scontrol", "show", "hostnames", always]).split())
    except SlurmError:
        return always
    return ",".join([*([always] if always else []), *excludable(bad, usable, needed=needed)])


def excluded_nodes_at(site: Site, experiment: Experiment, *, needed: int) -> str:
    """As `excluded_nodes`, for jobs to be submitted at a site; without SLURM, the profile's nodes."""
    always = site.exclude or ""
    # SLURM is not asked for nothing: where it does not answer, each question takes a minute.
    if not recent_bad_nodes(experiment):
        return always
    try:
        cluster = slurm.cluster().name
    except SlurmError:
        return always
    return excluded_nodes(experiment, cluster=cluster, partition=site.partition, needed=needed, always=always)


def excluded_here(experiment: Experiment, manifest: ArrayManifest) -> str:
    """The nodes to exclude from an array's jobs in the partition of the job that this process is in."""
    return excluded_nodes(
        experiment,
        cluster=manifest.cluster,
        partition=os.environ.get("SLURM_JOB_PARTITION"),
        needed=manifest.shape.nodes,
        always=manifest.exclude,
    )


def exclude_from(job_id: str, experiment: Experiment, manifest: ArrayManifest) -> None:
    """Exclude bad nodes from a pending job, or the pending tasks of an array; errors of SLURM are ignored.

    Called in a job of the same partition.
    """
    if recent_bad_nodes(experiment, cluster=manifest.cluster):
        with suppress(SlurmError):
            set_excluded(job_id, excluded_here(experiment, manifest))
