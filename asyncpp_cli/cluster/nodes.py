"""What SLURM says of nodes, and which of them a job is not to get."""

from __future__ import annotations

from asyncpp_cli.cluster.slurm import SlurmError, ask


def broken(nodes: str) -> dict[str, str]:
    """Which nodes SLURM takes for broken, with its word for their state; none where it does not answer.

    Args:
        nodes: as SLURM abbreviates them: `n[1-2]`.
    """
    if not nodes:
        return {}
    try:
        lines = ask(["sinfo", "-h", "-N", f"--nodes={nodes}", "-o", "%N %T"]).splitlines()
    except SlurmError:
        return {}
    states = dict(line.split(maxsplit=1) for line in lines)
    return {
        name: state.strip()
        for name, state in sorted(states.items())
        if state.startswith(("down", "fail")) or "*" in state
    }


def of_partition(partition: str | None) -> set[str]:
    """The names of a partition's nodes, of the default one's if none is named.

    Raises:
        SlurmError: SLURM does not answer.
    """
    lines = ask(["sinfo", "-h", "-N", "-o", "%N %P"]).splitlines()
    found = set()
    for line in lines:
        node, name = line.split()
        # The default one has a star behind it.
        if name.rstrip("*") == partition or (partition is None and name.endswith("*")):
            found.add(node)
    return found


def names(nodes: str) -> list[str]:
    """Every name of what SLURM abbreviates.

    Raises:
        SlurmError: it is no list of nodes, or SLURM does not answer.
    """
    return ask(["scontrol", "show", "hostnames", nodes]).split() if nodes else []


def exclude(job_id: str, nodes: str) -> None:
    """Keep a job from nodes that waits in the queue; of a whole array, those of its tasks that wait.

    Args:
        job_id: of the job or array.
        nodes: that it is not to get, instead of those before.

    Raises:
        SlurmError: SLURM refuses, for instance since the job does not wait.
    """
    ask(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={nodes}"])
