"""The rank of this process: from a supervisor, from torchrun, or as the only process."""

from __future__ import annotations

import os
from dataclasses import dataclass

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.launch.common.supervisor import ATTEMPT_VARIABLE

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Environment variables that torchrun and supervisors set."""


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


def read_rank_env() -> RankEnv:
    """This process's rank by its environment variables; rank 0 of 1 without them.

    Raises:
        UserError: a variable is no number, or the rank is none of those that it counts.
    """
    if not all(name in os.environ for name in VARIABLES):
        return RankEnv(0, 1, 0, 1, supervised=False)
    rank, size, local_rank, local_size = map(_count, VARIABLES)
    if rank >= size:
        raise UserError(f"RANK is {rank}; accepted: 0 to {size - 1}, as WORLD_SIZE is {size}")
    return RankEnv(rank, size, local_rank, local_size, supervised=ATTEMPT_VARIABLE in os.environ)


def _count(name: str) -> int:
    text = os.environ[name]
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"the environment variable {name} is {text!r}; accepted: an integer >= 0")
    return int(text)
