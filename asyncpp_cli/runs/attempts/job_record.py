"""The SLURM job that an attempt runs in, as recorded in attempt.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Job:
    """A SLURM job."""

    cluster: str
    """SLURM's name for the cluster."""
    name: str
    """Job name of the array, unique among all submissions."""
    index: int
    """Array index."""
    id: str
    """SLURM's id, `12_3`. SLURM reuses ids after some years; the name tells jobs apart."""
    restart: int
    """Number of times that SLURM has restarted it."""
    nodes: str
    """Its nodes, in SLURM's notation: `n[1-2]`."""
    submission: str
    """Its folder under EXPERIMENT/submissions."""


class Scheduler(Protocol):
    """Says whether an attempt has ended whose processes cannot be checked from here."""

    def is_over(self, job: Job, *, claimed: float) -> bool | None:
        """Whether that start of the job has ended; None if unknown.

        Args:
            job: the job that the attempt recorded.
            claimed: when the attempt was claimed, in seconds since 1970.
        """


_KINDS = {"index": int, "restart": int} | dict.fromkeys(("cluster", "name", "id", "nodes", "submission"), str)


def job_of(content: Mapping[str, Any] | None) -> Job | None:
    """The job in an attempt's description, if any.

    Raises:
        ValueError: the entry is not a job.
    """
    job = content.get("job") if content else None
    if not job:
        return None
    if not isinstance(job, dict) or any(type(job.get(name)) is not kind for name, kind in _KINDS.items()):
        raise ValueError(f"{job!r:.60} is no job")
    return Job(**{name: job[name] for name in _KINDS})
