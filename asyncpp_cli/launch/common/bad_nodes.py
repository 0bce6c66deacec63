"""Nodes that made runs fail; later attempts exclude them.

    EXPERIMENT/bad-nodes/NODE.json   what happened, to which run, and when

A node is bad if SLURM says so (down, failing, not responding), or after an error of its GPU or driver (CUDA
cannot be initialised, uncorrectable ECC errors). Such a failure does not use up a retry while the node can be
excluded. The number of excluded nodes is limited, since a software error mistaken for a node's fault would
otherwise move from node to node forever.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from asyncpp_cli.base.atomic_files import write_record
from asyncpp_cli.base.errors import DamagedError
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import Claimed, Job, RankEnd, RankError, RankStart
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.slurm import client as slurm
from asyncpp_cli.slurm.client import JobPhase, SlurmError, phase_of, rows, run_command
from asyncpp_cli.slurm.submissions import read_submissions
from stages.config.records import FileRecord, read_record

if TYPE_CHECKING:
    from asyncpp_cli.launch.common.arrays import ArrayManifest
    from asyncpp_cli.sites.profile import Site

EXCLUSION_SECONDS = 24 * 3600.0
"""Time for which a bad node is excluded; it may be repaired by then."""

_MAX_EXCLUDED = 8
_NODES_PER_EXCLUDED = 4
"""At most one node in this many is excluded, but always one."""

_LINES = 50
"""Lines to search at the end of a rank's log."""
_BYTES = 20_000

_FAULT = re.compile(
    r"CUDA (driver )?initiali[sz]ation"
    r"|CUDA error: (unknown error|initialization error|system not yet initialized|hardware stack error)"
    r"|CUDA unknown error"
    r"|CUDA-capable device(s|\(s\))? (is/are|are|is) busy or unavailable"
    r"|no CUDA-capable device is detected"
    r"|torch finds no GPU here"
    r"|uncorrectable (ECC|NVLink) error"
    r"|cudaError(ECCUncorrectable|NvlinkUncorrectable|SystemNotReady|DevicesUnavailable|NoDevice)"
    r"|GPU is lost|fallen off the bus"
    r"|Driver/library version mismatch|NVML: Unknown Error|couldn't communicate with the NVIDIA driver",
    re.IGNORECASE,
)
"""Messages of CUDA, its driver and torch about faults of the hardware or driver (torch/cuda/__init__.py,
cudaGetErrorString, NVIDIA's Xid errors 48 and 79)."""


class BadNode(FileRecord, frozen=True, kw_only=True):
    """Content of a node's file."""

    node: str
    """SLURM's name."""
    cluster: str
    reason: str
    run: str
    """Id of the run that failed."""
    attempt: int
    time: float
    """Seconds since 1970."""


def node_fault(attempt: Attempt) -> tuple[str, str] | None:
    """The node whose fault made an attempt fail, with the message; None if it was no node's fault."""
    for rank, end in attempt.by_rank(RankEnd).items():
        start, error = attempt.read(RankStart, rank), attempt.read(RankError, rank)
        if end.code == 0 or end.stopped or start is None or not start.node:
            continue
        for line in ([] if error is None else [error.message]) + _last_lines(attempt, rank):
            if _FAULT.search(line):
                return start.node, f"rank {rank}: {line.strip()[:200]}"
    return None


def _last_lines(attempt: Attempt, rank: int) -> list[str]:
    """The last lines of a rank's log, in reverse order."""
    log = attempt.run.log_file(attempt=attempt.number, rank=rank)
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return lines[: -_LINES - 1 : -1]


def record_bad_node(
    experiment: Experiment, run: Run, *, node: str, cluster: str, reason: str, attempt: int
) -> None:
    """Record a bad node, unless it is recorded already."""
    if any(bad.node == node for bad in recent_bad_nodes(experiment, cluster=cluster)):
        return
    bad = BadNode(node=node, cluster=cluster, reason=reason, run=run.id, attempt=attempt, time=time.time())
    # If it cannot be recorded (full disk), the failure counts as the run's.
    with suppress(OSError):
        _folder(experiment).mkdir(exist_ok=True)
        write_record(_file(experiment, node), bad)


def recent_bad_nodes(experiment: Experiment, *, cluster: str | None = None) -> list[BadNode]:
    """Bad nodes recorded within the exclusion time, the earliest first.

    Args:
        experiment: the experiment.
        cluster: only nodes of this cluster; None: of all.
    """
    bad_nodes = []
    for file in _folder(experiment).glob("*.json"):
        try:
            bad = read_record(file, BadNode)
        except (OSError, DamagedError):
            continue
        if time.time() - bad.time < EXCLUSION_SECONDS and cluster in (None, bad.cluster):
            bad_nodes.append(bad)
    return sorted(bad_nodes, key=lambda bad: (bad.time, bad.node))


def excludable(bad: Sequence[BadNode], nodes: Collection[str], *, needed: int) -> list[str]:
    """Names of the bad nodes that can be excluded, sorted.

    Args:
        bad: bad nodes, the earliest first; the latest are dropped if there are too many.
        nodes: usable nodes of the partition.
        needed: nodes per job.
    """
    most = min(max(1, len(nodes) // _NODES_PER_EXCLUDED), _MAX_EXCLUDED, len(nodes) - needed)
    # SLURM refuses a job that excludes a node the cluster does not have.
    existing = [each.node for each in bad if each.node in nodes]
    return sorted(existing[: max(0, most)])


def exclusion_notes(experiment: Experiment) -> list[str]:
    """One line for each excluded node."""
    return [
        f"Node {bad.node} is excluded from new attempts until {_until(bad)}: {bad.reason} ({bad.run}, "
        f"attempt {bad.attempt}); to use it sooner: rm {_file(experiment, bad.node)}"
        for bad in recent_bad_nodes(experiment)
    ]


def _until(bad: BadNode) -> str:
    return time.strftime("%F %H:%M", time.localtime(bad.time + EXCLUSION_SECONDS))


def _folder(experiment: Experiment) -> Path:
    return experiment.folder / "bad-nodes"


def _file(experiment: Experiment, node: str) -> Path:
    return _folder(experiment) / f"{node}.json"


def broken_nodes(nodes: str) -> dict[str, str]:
    """Nodes that are down, failing or not responding, with their states; none if SLURM does not answer.

    Args:
        nodes: list in SLURM's notation: `n[1-2]`.
    """
    if not nodes:
        return {}
    try:
        states = sorted(rows(["sinfo", "--all", "-h", "-N", f"--nodes={nodes}", "-o", "%N|%T"], fields=2))
    except SlurmError:
        return {}
    return {name: state for name, state in states if state.startswith(("down", "fail")) or "*" in state}


def _names(nodes: str) -> list[str]:
    return run_command(["scontrol", "show", "hostnames", nodes]).split() if nodes else []


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
        partition: the job's partition; None: the default one, which `sinfo` marks with a star.
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
            if name.rstrip("*") == partition or (partition is None and name.endswith("*"))
        } - set(_names(always))
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


def _excluded_here(experiment: Experiment, manifest: ArrayManifest) -> str:
    """The nodes to exclude from an array's jobs in the partition of the job that this process is in."""
    return excluded_nodes(
        experiment,
        cluster=manifest.cluster,
        partition=os.environ.get("SLURM_JOB_PARTITION"),
        needed=manifest.shape.nodes,
        always=manifest.exclude,
    )


def node_fault_reason(experiment: Experiment, attempt: Attempt, manifest: ArrayManifest, job: Job) -> str:
    """Record a node whose fault made an attempt fail, and describe it; empty if the failure is the run's."""
    if description := record_broken_nodes(experiment, attempt, job):
        return description
    if (fault := node_fault(attempt)) is None:
        return ""
    node, reason = fault
    record_bad_node(
        experiment, attempt.run, node=node, cluster=job.cluster, reason=reason, attempt=attempt.number
    )
    # A node that cannot be excluded, or was to be and is not, would make the run fail again and again.
    claimed = attempt.read(Claimed)
    known_before = claimed is not None and any(
        bad.node == node and bad.time < claimed.claimed for bad in recent_bad_nodes(experiment)
    )
    if known_before or node not in _excluded_here(experiment, manifest).split(","):
        return ""
    return f"the fault of node {node}, which is excluded from now on"


def record_broken_nodes(experiment: Experiment, attempt: Attempt, job: Job) -> str:
    """Record which nodes of a job are broken, and describe them; empty if none is."""
    broken = broken_nodes(job.nodes)
    for node, state in broken.items():
        reason = f"SLURM had it as {state}"
        record_bad_node(
            experiment, attempt.run, node=node, cluster=job.cluster, reason=reason, attempt=attempt.number
        )
    return ", ".join(f"node {node} is {state}" for node, state in broken.items())


def exclude_from_waiting(experiment: Experiment, *, cluster: str) -> None:
    """Exclude bad nodes from the experiment's pending jobs.

    Called in a job, for jobs of its partition. Errors of SLURM are ignored.
    """
    # `status` reads bad nodes without what submits jobs, which takes as long to import as all the rest.
    from asyncpp_cli.launch.common.arrays import read_manifest

    if not recent_bad_nodes(experiment, cluster=cluster):
        return
    submissions = read_submissions(experiment)
    try:
        queued = slurm.queued_jobs(submissions.job_names)
    except SlurmError:
        return
    pending = {key: job for key, job in queued.items() if phase_of(job.state) is JobPhase.PENDING}
    waiting = {name: job.id.partition("_")[0] for (name, _), job in pending.items()}
    for submission in submissions.all:
        for array in submission.arrays:
            if array.name in waiting and submission.cluster == cluster:
                # SLURM also reports an error if some of the tasks are not pending.
                with suppress(DamagedError, FileNotFoundError, SlurmError):
                    manifest = read_manifest(submission.folder / array.file)
                    set_excluded(waiting[array.name], _excluded_here(experiment, manifest))


def excluded_nodes_of(experiment: Experiment, manifest: ArrayManifest, job: Job) -> list[str]:
    """Nodes of this job that are to be excluded from it.

    SLURM changes the exclusion of pending jobs only, and one that it requeues itself may start before anybody
    can tell it.
    """
    if not recent_bad_nodes(experiment, cluster=manifest.cluster):
        return []
    try:
        return sorted(set(_names(job.nodes)) & set(_names(_excluded_here(experiment, manifest))))
    except SlurmError:
        return []


def exclude_from_requeued(experiment: Experiment, manifest: ArrayManifest, job: Job) -> None:
    """Exclude bad nodes from this job, which has just been requeued and is still ending."""
    if recent_bad_nodes(experiment, cluster=manifest.cluster):
        with suppress(SlurmError):
            set_excluded(job.id, _excluded_here(experiment, manifest))
