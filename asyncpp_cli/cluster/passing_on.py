"""A place among the runs that may go on at once, passed on by a job that ends to another array of its launch.

SLURM counts each array by itself: without this the places of an array that has few tasks left stay empty,
while another has runs that wait. What may run together never becomes more than was said: a job gives away one
place, its own, and only if the rest of its array, and the array that follows in its lane, have no use for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from asyncpp_cli.cluster import slurm
from asyncpp_cli.cluster.job_states import Phase, phase_of
from asyncpp_cli.cluster.slurm import QueuedJob, SlurmError
from asyncpp_cli.cluster.submissions import Submission

_DEPENDENCY = "Dependency"
"""SLURM's reason for an array that waits for another."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """An array that still has tasks."""

    name: str
    tasks: int
    """That have not ended."""
    at_once: int
    """Of them that may run together."""
    follows: bool
    """It begins when another has ended."""


def heir(mine: Waiting, others: Sequence[Waiting], *, follower: Waiting | None) -> Waiting | None:
    """The array that gets the place of a task that ends; None if it is still needed, or nobody needs it.

    Args:
        mine: the task's own array, without the task.
        others: of the launch.
        follower: of these, the one that begins when `mine` has ended.
    """
    kept = follower.at_once if follower is not None else 0
    before, after = (max(min(mine.at_once, tasks), kept) for tasks in (mine.tasks + 1, mine.tasks))
    needy = [other for other in others if not other.follows and other.tasks > other.at_once]
    if after == before or not needy:
        return None
    return max(needy, key=lambda other: other.tasks / other.at_once)


def pass_on(submission: Submission, *, name: str, index: int) -> str | None:
    """Pass on the place of a task that ends for good. The array that got it.

    Args:
        submission: of the task.
        name: of its array.
        index: in it.

    Raises:
        SlurmError: SLURM does not answer, or refuses.
    """
    if len(submission.arrays) < 2:
        return None
    queued = slurm.queued([array.name for array in submission.arrays])
    by_array: dict[str, list[QueuedJob]] = {}
    for (array, of_index), job in sorted(queued.items(), key=lambda item: item[0]):
        if (array, of_index) != (name, index):
            by_array.setdefault(array, []).append(job)
    # Those of which nothing waits need no place, and those of a launch without a bound have all they need.
    waiting = {
        array: jobs for array, jobs in by_array.items() if array != name and any(_waits(job) for job in jobs)
    }
    me = queued.get((name, index))
    if not waiting or me is None or phase_of(me.state) is not Phase.RUNS:
        return None  # if it does not run, it may come back
    known = {array: _waiting(array, jobs) for array, jobs in waiting.items()}
    mine = Waiting(name=name, tasks=len(by_array.get(name, [])), at_once=at_once(me.id), follows=False)
    next_one = next((array.name for array in submission.arrays if array.after == name), "")
    found = heir(mine, list(known.values()), follower=known.get(next_one))
    if found is None:
        return None
    number = waiting[found.name][0].id.partition("_")[0]
    slurm.ask(["scontrol", "update", f"JobId={number}", f"ArrayTaskThrottle={found.at_once + 1}"])
    return found.name


def _waiting(name: str, jobs: Sequence[QueuedJob]) -> Waiting:
    first = next(job for job in jobs if _waits(job))
    follows = all(job.reason == _DEPENDENCY for job in jobs)
    return Waiting(name=name, tasks=len(jobs), at_once=at_once(first.id), follows=follows)


def _waits(job: QueuedJob) -> bool:
    return phase_of(job.state) is Phase.WAITS


def at_once(job_id: str) -> int:
    """How many tasks of a job's array may run together.

    Raises:
        SlurmError: SLURM does not say.
    """
    shown = slurm.ask(["scontrol", "show", "job", "--oneliner", job_id])
    found = re.search(r"\bArrayTaskThrottle=(\d+)", shown)
    if found is None:
        raise SlurmError(f"scontrol: no ArrayTaskThrottle of {job_id}")
    return int(found[1])
