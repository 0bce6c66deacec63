"""Handing the slot of a job that ends to another array of the same launch, by raising that array's throttle.

SLURM throttles each array by itself: without this, slots of an array with few tasks left stay empty while
tasks of another one wait. The total never exceeds the launch's limit: a job hands over only its own slot, and
only if neither the rest of its array nor the array that follows it in its lane needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncpp_cli.launch.slurm import client as slurm
from asyncpp_cli.launch.slurm.client import QueuedJob
from asyncpp_cli.launch.slurm.job_states import JobPhase, phase_of
from asyncpp_cli.launch.slurm.submissions import Submission

_DEPENDENCY = "Dependency"
"""SLURM's pending reason of an array that waits for another."""


@dataclass(frozen=True, kw_only=True)
class ArrayLoad:
    """An array with tasks left."""

    name: str
    tasks: int
    """Tasks that have not ended."""
    at_once: int
    """Its throttle: tasks that may run at the same time."""
    follows: bool
    """It starts when another array has ended."""


def receiving_array(
    own: ArrayLoad, others: Sequence[ArrayLoad], *, follower: ArrayLoad | None
) -> ArrayLoad | None:
    """The array that gets the slot of a task that ends; None if its own array needs it, or none does.

    Args:
        own: the task's own array, without the task.
        others: other arrays of the launch.
        follower: the one among them that starts when `own` has ended.
    """
    reserved = follower.at_once if follower is not None else 0
    before, after = (max(min(own.at_once, tasks), reserved) for tasks in (own.tasks + 1, own.tasks))
    needy = [other for other in others if not other.follows and other.tasks > other.at_once]
    if after == before or not needy:
        return None
    return max(needy, key=lambda other: other.tasks / other.at_once)


def hand_over_slot(submission: Submission, *, name: str, index: int) -> str | None:
    """Hand over the slot of a task that ends for good; returns the array that got it.

    Args:
        submission: the task's submission.
        name: name of the task's array.
        index: the task's array index.

    Raises:
        SlurmError: SLURM does not answer, or refuses.
    """
    if len(submission.arrays) < 2:
        return None
    queued = slurm.queued_jobs([array.name for array in submission.arrays])
    by_array: dict[str, list[QueuedJob]] = {}
    for (array, other_index), job in sorted(queued.items(), key=lambda item: item[0]):
        if (array, other_index) != (name, index):
            by_array.setdefault(array, []).append(job)
    # Arrays without pending tasks need no slot, and without a limit no array has any.
    pending = {
        array: jobs
        for array, jobs in by_array.items()
        if array != name and any(_is_pending(job) for job in jobs)
    }
    own_job = queued.get((name, index))
    if not pending or own_job is None or phase_of(own_job.state) is not JobPhase.RUNNING:
        return None  # a job that does not run may be requeued
    loads = {array: _load_of(array, jobs) for array, jobs in pending.items()}
    own = ArrayLoad(
        name=name, tasks=len(by_array.get(name, [])), at_once=throttle_of(own_job.id), follows=False
    )
    follower = next((array.name for array in submission.arrays if array.after == name), "")
    receiver = receiving_array(own, list(loads.values()), follower=loads.get(follower))
    if receiver is None:
        return None
    array_id = pending[receiver.name][0].id.partition("_")[0]
    throttle = f"ArrayTaskThrottle={receiver.at_once + 1}"
    slurm.run_command(["scontrol", "update", f"JobId={array_id}", throttle])
    return receiver.name


def _load_of(name: str, jobs: Sequence[QueuedJob]) -> ArrayLoad:
    first = next(job for job in jobs if _is_pending(job))
    follows = all(job.reason == _DEPENDENCY for job in jobs)
    return ArrayLoad(name=name, tasks=len(jobs), at_once=throttle_of(first.id), follows=follows)


def _is_pending(job: QueuedJob) -> bool:
    return phase_of(job.state) is JobPhase.PENDING


def throttle_of(job_id: str) -> int:
    """Throttle of a job's array: the number of its tasks that may run at the same time.

    Raises:
        SlurmError: SLURM does not say.
    """
    return slurm.shown_number(job_id, "ArrayTaskThrottle")
