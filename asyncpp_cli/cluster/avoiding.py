"""Keeping jobs from bad nodes: those that are submitted, those that wait, and one that is queued again."""

from __future__ import annotations

import os
from contextlib import suppress

from asyncpp_cli.cluster import bad_nodes, nodes, slurm
from asyncpp_cli.cluster.attempts import Attempt
from asyncpp_cli.cluster.job_states import Phase, phase_of
from asyncpp_cli.cluster.jobs import Job
from asyncpp_cli.cluster.sites import Site
from asyncpp_cli.cluster.slurm import SlurmError
from asyncpp_cli.cluster.submissions import read_submissions
from asyncpp_cli.cluster.table import ArrayTable, read_table
from asyncpp_cli.errors import DamagedError
from asyncpp_cli.runs import Experiment


def excluded(experiment: Experiment, *, cluster: str, partition: str | None, needed: int, always: str) -> str:
    """The nodes that a job is not to get, as SLURM takes them; empty for none.

    Args:
        experiment: whose job.
        cluster: SLURM's name for the cluster.
        partition: of the job; None: the default one.
        needed: as many nodes the job takes.
        always: what the site's profile excludes.
    """
    bad = bad_nodes.noted(experiment, cluster=cluster)
    if not bad:
        return always
    try:
        usable = nodes.of_partition(partition) - set(nodes.names(always))
    except SlurmError:
        return always
    return ",".join([*([always] if always else []), *bad_nodes.left_out(bad, usable, needed=needed)])


def excluded_at(site: Site, experiment: Experiment, *, needed: int) -> str:
    """As `excluded`, for jobs that are to be submitted at a site. Without SLURM: what the profile says."""
    always = site.exclude or ""
    try:
        cluster = slurm.cluster().name
    except SlurmError:
        return always
    return excluded(experiment, cluster=cluster, partition=site.partition, needed=needed, always=always)


def fault_of_nodes(experiment: Experiment, attempt: Attempt, table: ArrayTable, job: Job) -> str:
    """Why an attempt that failed is no failure of the run: nodes are bad, and left out from now on.

    Args:
        experiment: whose run.
        attempt: at it.
        table: of the job's array.
        job: in which it failed.

    Returns:
        The reason; empty if it is the run's failure.
    """
    if words := note_broken(experiment, attempt, job):
        return words
    if (fault := bad_nodes.fault_of(attempt)) is None:
        return ""
    node, reason = fault
    bad_nodes.note(
        experiment, attempt.run, node=node, cluster=job.cluster, reason=reason, attempt=attempt.number
    )
    # One that cannot be left out, or was to be and is not, would fail the run again without end.
    claimed = float((attempt.read("attempt") or {}).get("claimed", 0.0))
    known_before = any(bad.node == node and bad.time < claimed for bad in bad_nodes.noted(experiment))
    now = _excluded_here(experiment, table)
    if known_before or node not in now.split(","):
        return ""
    return f"the fault of node {node}, which is left out from now on"


def _excluded_here(experiment: Experiment, table: ArrayTable) -> str:
    """What jobs of this job's partition are not to get."""
    return excluded(
        experiment,
        cluster=table.cluster,
        partition=os.environ.get("SLURM_JOB_PARTITION"),
        needed=table.shape.nodes,
        always=table.exclude,
    )


def note_broken(experiment: Experiment, attempt: Attempt, job: Job) -> str:
    """Keep which of a job's nodes SLURM takes for broken. The same in words; empty if none."""
    words = []
    for node, state in nodes.broken(job.nodes).items():
        reason = f"SLURM had it as {state}"
        bad_nodes.note(
            experiment, attempt.run, node=node, cluster=job.cluster, reason=reason, attempt=attempt.number
        )
        words.append(f"node {node} is {state}")
    return ", ".join(words)


def exclude_from_waiting(experiment: Experiment, *, cluster: str) -> None:
    """Keep jobs of an experiment that wait in the queue from the nodes that have been found to be bad.

    To be called in a job, for those of its partition. Where SLURM refuses, they run where they may.
    """
    if not bad_nodes.noted(experiment, cluster=cluster):
        return
    submissions = read_submissions(experiment)
    try:
        queued = slurm.queued(submissions.job_names)
    except SlurmError:
        return
    waiting = {
        name: job.id.partition("_")[0]
        for (name, _), job in queued.items()
        if phase_of(job.state) is Phase.WAITS
    }
    for submission in submissions.all:
        for array in submission.arrays:
            if array.name not in waiting or submission.cluster != cluster:
                continue
            try:
                table = read_table(submission.folder / array.file)
                nodes.exclude(waiting[array.name], _excluded_here(experiment, table))
            except (DamagedError, FileNotFoundError, SlurmError):
                continue  # SLURM says so as well if some of the tasks do not wait


def exclude_from_requeued(experiment: Experiment, table: ArrayTable, job: Job) -> None:
    """Keep this job from bad nodes, which has just been queued again and still ends."""
    if bad_nodes.noted(experiment, cluster=table.cluster):
        with suppress(SlurmError):
            nodes.exclude(job.id, _excluded_here(experiment, table))
