"""SLURM's nodes: their states and names, and excluding them from jobs."""

from __future__ import annotations

from asyncpp_cli.launch.slurm.client import SlurmError, run_command


def broken(nodes: str) -> dict[str, str]:
    """Nodes that are down, failing or not responding, with their states; none if SLURM does not answer.

    Args:
        nodes: list in SLURM's notation: `n[1-2]`.
    """
    if not nodes:
        return {}
    try:
        lines = run_command(["sinfo", "-h", "-N", f"--nodes={nodes}", "-o", "%N %T"]).splitlines()
    except SlurmError:
        return {}
    states = dict(line.split(maxsplit=1) for line in lines)
    return {
        name: state.strip()
        for name, state in sorted(states.items())
        if state.startswith(("down", "fail")) or "*" in state
    }


def of_partition(partition: str | None) -> set[str]:
    """Names of a partition's nodes; None: the default partition.

    Raises:
        SlurmError: SLURM does not answer.
    """
    lines = run_command(["sinfo", "-h", "-N", "-o", "%N %P"]).splitlines()
    members = set()
    for line in lines:
        node, name = line.split()
        # The default partition is marked with a star.
        if name.rstrip("*") == partition or (partition is None and name.endswith("*")):
            members.add(node)
    return members


def of_cluster() -> set[str]:
    """Names of all nodes of the cluster.

    Raises:
        SlurmError: SLURM does not answer.
    """
    return set(run_command(["sinfo", "-h", "-N", "-o", "%N"]).split())


def names(nodes: str) -> list[str]:
    """Names of the nodes in a list in SLURM's notation.

    Raises:
        SlurmError: it is not a list of nodes, or SLURM does not answer.
    """
    return run_command(["scontrol", "show", "hostnames", nodes]).split() if nodes else []


def exclude(job_id: str, nodes: str) -> None:
    """Set the nodes that a pending job, or the pending tasks of an array, must not use.

    Args:
        job_id: id of the job or array.
        nodes: nodes to exclude; replaces earlier ones.

    Raises:
        SlurmError: SLURM refuses, for instance because the job is not pending.
    """
    run_command(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={nodes}"])
