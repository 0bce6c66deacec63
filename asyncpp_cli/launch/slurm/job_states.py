"""Mapping SLURM's job states to phases.

`squeue` prints one state. A job has a base state (PENDING, RUNNING, ...) and flags, and a flag hides the base
state: a running job is SIGNALING from the time a signal is sent until every node has acknowledged it. The
states are those of SLURM's `job_state_string`
(src/common/slurm_protocol_defs.c, read up to version 26.11) and of the man page squeue(1), JOB STATE CODES.
"""

from __future__ import annotations

from enum import StrEnum


class JobPhase(StrEnum):
    """Phase of a job between submission and end."""

    PENDING = "pending"
    """It has no nodes yet; SLURM starts it, possibly again or after being released."""
    RUNNING = "running"
    """It has nodes and is not being ended."""
    ENDING = "ending"
    """It is being ended; processes of it may still run."""
    ENDED = "ended"
    """No process of it runs, and it is not restarted."""


_PHASES = {
    "PENDING": JobPhase.PENDING,
    "REQUEUED": JobPhase.PENDING,
    "REQUEUE_FED": JobPhase.PENDING,
    "REQUEUE_HOLD": JobPhase.PENDING,
    "SPECIAL_EXIT": JobPhase.PENDING,  # requeued and held, by `scontrol requeuehold State=SpecialExit`
    "RESV_DEL_HOLD": JobPhase.PENDING,  # held: its reservation was deleted
    "EXPEDITING": JobPhase.PENDING,  # requeued with priority
    "RUNNING": JobPhase.RUNNING,
    "CONFIGURING": JobPhase.RUNNING,  # its nodes may still be booting
    "POWER_UP_NODE": JobPhase.RUNNING,
    "RESIZING": JobPhase.RUNNING,
    "SIGNALING": JobPhase.RUNNING,  # not every node has acknowledged a signal
    "STOPPED": JobPhase.RUNNING,  # by SIGSTOP; it keeps its CPUs
    "SUSPENDED": JobPhase.RUNNING,  # its CPUs are lent to others for a while
    "UPDATE_DB": JobPhase.RUNNING,  # its accounting record is updated
    "COMPLETING": JobPhase.ENDING,
    "STAGE_OUT": JobPhase.ENDING,  # files are copied from a burst buffer
    "BOOT_FAIL": JobPhase.ENDED,
    "CANCELLED": JobPhase.ENDED,
    "COMPLETED": JobPhase.ENDED,
    "DEADLINE": JobPhase.ENDED,
    "FAILED": JobPhase.ENDED,
    "LAUNCH_FAILED": JobPhase.ENDED,
    "NODE_FAIL": JobPhase.ENDED,
    "OUT_OF_MEMORY": JobPhase.ENDED,
    "PREEMPTED": JobPhase.ENDED,
    "RECONFIG_FAIL": JobPhase.ENDED,
    "REVOKED": JobPhase.ENDED,  # started by another cluster of the federation
    "TIMEOUT": JobPhase.ENDED,
}

KNOWN = frozenset(_PHASES)
"""The known states."""


def phase_of(state: str) -> JobPhase:
    """The phase of a queued job, by SLURM's state.

    Unknown states, of later versions of SLURM, count as running: requeueing then fails at worst.
    """
    return _PHASES.get(state, JobPhase.RUNNING)
