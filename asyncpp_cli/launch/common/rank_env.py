"""The rank of this process: from a supervisor, from whatever started it, or as the only process."""

from __future__ import annotations

import os
from dataclasses import dataclass

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.launch.common.supervisor import ATTEMPT_VARIABLE


@dataclass(frozen=True)
class Starter:
    """A program that starts a process per rank, and the environment variables that it sets."""

    name: str
    rank: str
    size: str | None
    """Number of processes; None: it does not say, so there are as many as the run has ranks."""


STARTERS = (
    Starter("torchrun", "RANK", "WORLD_SIZE"),
    Starter("Open MPI's mpiexec", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    Starter("mpiexec", "PMI_RANK", "PMI_SIZE"),
    Starter("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    Starter("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    Starter("Kubernetes", "JOB_COMPLETION_INDEX", None),
)
"""Ranks on a machine are counted when all have joined, so no starter's local rank is read."""


@dataclass(frozen=True)
class RankEnv:
    """This process's rank."""

    rank: int
    size: int
    local_rank: int
    """Rank among the processes on this machine."""
    local_size: int
    """Number of processes on this machine."""
    supervised: bool


def read_rank_env(processes: int) -> RankEnv:
    """This process's rank by its environment variables; rank 0 of 1 without them.

    A starter inside another one, such as torchrun in a pod, has the word: the outer one counts nodes. If
    several count as many processes as the run has, they must agree.

    Args:
        processes: number of processes of the run.

    Raises:
        UserError: the variables contradict each other, or count another number of processes.
    """
    environment = os.environ
    if ATTEMPT_VARIABLE in environment:
        rank, size, local_rank, local_size = (
            int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
        return RankEnv(rank, size, local_rank, local_size, supervised=True)
    if processes == 1:
        size = _count("WORLD_SIZE") if "WORLD_SIZE" in environment else 1  # torchrun's
        return RankEnv(0, max(1, size), 0, 1, supervised=False)
    # Those whose variables are all there: a batch script of SLURM has a rank and no number of tasks.
    starters = [each for each in STARTERS if {each.rank, each.size or each.rank} <= environment.keys()]
    if "TORCHELASTIC_RUN_ID" in environment:
        starters = [starter for starter in starters if starter.rank == "RANK"]
    if any(starter.size for starter in starters):
        starters = [starter for starter in starters if starter.size]
    sizes = {starter: processes if starter.size is None else _count(starter.size) for starter in starters}
    fitting = [starter for starter in starters if sizes[starter] == processes]
    if not fitting:
        return RankEnv(0, next(iter(sizes.values()), 1), 0, 1, supervised=False)
    ranks = {starter.rank: _count(starter.rank) for starter in fitting}
    if len(set(ranks.values())) > 1:
        told = " and ".join(f"{name} is {rank}" for name, rank in ranks.items())
        raise UserError(f"{told}: unset those that do not hold, or start the ranks with one starter")
    [(name, rank)] = list(ranks.items())[:1]
    if rank >= processes:
        raise UserError(f"{name} is {rank}; accepted: 0 to {processes - 1}, as the run has {processes} ranks")
    return RankEnv(rank, processes, 0, 1, supervised=False)


def _count(name: str) -> int:
    text = os.environ[name]
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"the environment variable {name} is {text!r}; accepted: an integer >= 0")
    return int(text)
