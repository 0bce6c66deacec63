"""Excluding bad nodes from jobs: newly submitted, pending and requeued ones."""

from __future__ import annotations

import os
from contextlib import suppress

from asyncpp_cli.errors import DamagedError
from asyncpp_cli.launch.sites import Site
from asyncpp_cli.launch.slurm import bad_nodes, nodes
from asyncpp_cli.launch.slurm import client as slurm
from asyncpp_cli.launch.slurm.client import SlurmError
from asyncpp_cli.launch.slurm.job_states import JobPhase, phase_of
from asyncpp_cli.launch.slurm.submissions import read_submissions
from asyncpp_cli.launch.submission.array_manifest import ArrayManifest, read_manifest
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import Claimed, Job
from asyncpp_cli.runs.experiment_folder import Experiment


def excluded_nodes(
    experiment: Experiment, *, cluster: str, partition: str | None, needed: int, always: str
) -> str:
    """The nodes to exclude from a job, in SLURM's notation; empty for none.

    Args:
        experiment: the experiment.
        cluster: SLURM's name of the cluster.
        partition: the job's partition; None: the default one.
        needed: number of nodes of the job.
        always: nodes that the site profile excludes.
    """
    bad = bad_nodes.recent_bad_nodes(experiment, cluster=cluster)
    if not bad:
        return always
    try:
        usable = nodes.of_partition(partition) - set(nodes.names(always))
    except SlurmError:
        return always
    return ",".join([*([always] if always else []), *bad_nodes.excludable(bad, usable, needed=needed)])


def excluded_nodes_at(site: Site, experiment: Experiment, *, needed: int) -> str:
    """As `excluded_nodes`, for jobs to be submitted at a site; without SLURM, the profile's nodes."""
    always = site.exclude or ""
    # SLURM is not asked for nothing: where it does not answer, each question takes a minute.
    if not bad_nodes.recent_bad_nodes(experiment):
        return always
    try:
        cluster = slurm.cluster().name
    except SlurmError:
        return always
    return excluded_nodes(experiment, cluster=cluster, partition=site.partition, needed=needed, always=always)


def node_fault_reason(experiment: Experiment, attempt: Attempt, manifest: ArrayManifest, job: Job) -> str:
    """Record a node whose fault made an attempt fail, and describe it; empty if the failure is the run's.

    Args:
        experiment: the experiment.
        attempt: the failed attempt.
        manifest: manifest of the job's array.
        job: the job.
    """
    if description := record_broken_nodes(experiment, attempt, job):
        return description
    if (fault := bad_nodes.node_fault(attempt)) is None:
        return ""
    node, reason = fault
    bad_nodes.record_bad_node(
        experiment, attempt.run, node=node, cluster=job.cluster, reason=reason, attempt=attempt.number
    )
    # A node that cannot be excluded, or was to be and is not, would make the run fail again and again.
    claimed = attempt.read(Claimed)
    known_before = claimed is not None and any(
        bad.node == node and bad.time < claimed.claimed for bad in bad_nodes.recent_bad_nodes(experiment)
    )
    now = _excluded_here(experiment, manifest)
    if known_before or node not in now.split(","):
        return ""
    return f"the fault of node {node}, which is excluded from now on"


def _excluded_here(experiment: Experiment, manifest: ArrayManifest) -> str:
    """The nodes to exclude from jobs in this job's partition."""
    return excluded_nodes(
        experiment,
        cluster=manifest.cluster,
        partition=os.environ.get("SLURM_JOB_PARTITION"),
        needed=manifest.shape.nodes,
        always=manifest.exclude,
    )


def record_broken_nodes(experiment: Experiment, attempt: Attempt, job: Job) -> str:
    """Record which nodes of a job are broken, and describe them; empty if none is."""
    descriptions = []
    for node, state in nodes.broken(job.nodes).items():
        reason = f"SLURM had it as {state}"
        bad_nodes.record_bad_node(
            experiment, attempt.run, node=node, cluster=job.cluster, reason=reason, attempt=attempt.number
        )
        descriptions.append(f"node {node} is {state}")
    return ", ".join(descriptions)


def exclude_from_waiting(experiment: Experiment, *, cluster: str) -> None:
    """Exclude bad nodes from the experiment's pending jobs.

    Called in a job, for jobs of its partition. Errors of SLURM are ignored.
    """
    if not bad_nodes.recent_bad_nodes(experiment, cluster=cluster):
        return
    submissions = read_submissions(experiment)
    try:
        queued = slurm.queued_jobs(submissions.job_names)
    except SlurmError:
        return
    waiting = {
        name: job.id.partition("_")[0]
        for (name, _), job in queued.items()
        if phase_of(job.state) is JobPhase.PENDING
    }
    for submission in submissions.all:
        for array in submission.arrays:
            if array.name not in waiting or submission.cluster != cluster:
                continue
            try:
                manifest = read_manifest(submission.folder / array.file)
                nodes.exclude(waiting[array.name], _excluded_here(experiment, manifest))
            except (DamagedError, FileNotFoundError, SlurmError):
                continue  # SLURM also reports an error if some of the tasks are not pending


def excluded_nodes_of(experiment: Experiment, manifest: ArrayManifest, job: Job) -> list[str]:
    """Nodes of this job that are to be excluded from it.

    SLURM changes the exclusion of pending jobs only, and one that it requeues itself may start before anybody
    can tell it.
    """
    if not bad_nodes.recent_bad_nodes(experiment, cluster=manifest.cluster):
        return []
    try:
        return sorted(set(nodes.names(job.nodes)) & set(nodes.names(_excluded_here(experiment, manifest))))
    except SlurmError:
        return []


def exclude_from_requeued(experiment: Experiment, manifest: ArrayManifest, job: Job) -> None:
    """Exclude bad nodes from this job, which has just been requeued and is still ending."""
    if bad_nodes.recent_bad_nodes(experiment, cluster=manifest.cluster):
        with suppress(SlurmError):
            nodes.exclude(job.id, _excluded_here(experiment, manifest))
