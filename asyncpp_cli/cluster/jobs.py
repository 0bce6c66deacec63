"""The job that an attempt runs in, and who can say whether that job is over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Job:
    """A SLURM job, as the attempts that run in it record it."""

    cluster: str
    """SLURM's name for the cluster."""
    name: str
    """Of the array: no other submission has it."""
    index: int
    """In the array."""
    id: str
    """What SLURM calls it, `12_3`. Ids are used again after some years, so the name goes with it."""
    restart: int
    """How many times SLURM has started it again."""
    nodes: str
    """What it was given, as SLURM abbreviates it: `n[1-2]`."""
    submission: str
    """The folder under EXPERIMENT/submissions that it comes from."""


class Scheduler(Protocol):
    """A second opinion on attempts whose processes cannot be looked at from here."""

    def is_over(self, job: Job, *, claimed: float) -> bool | None:
        """Whether nothing of that start of the job runs any more; None where that is not known.

        Args:
            job: as the attempt recorded it.
            claimed: when the attempt was, in seconds since 1970.
        """


_KINDS = {"index": int, "restart": int} | dict.fromkeys(("cluster", "name", "id", "nodes", "submission"), str)


def job_of(content: Mapping[str, Any] | None) -> Job | None:
    """The job that an attempt's description names, if any.

    Raises:
        ValueError: what stands there is no job.
    """
    job = content.get("job") if content else None
    if not job:
        return None
    if not isinstance(job, dict) or any(type(job.get(name)) is not kind for name, kind in _KINDS.items()):
        raise ValueError(f"{job!r:.60} is no job")
    return Job(**{name: job[name] for name in _KINDS})
