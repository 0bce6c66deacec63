"""What SLURM's words for the state of a job mean for a run.

`squeue` prints one word. A job has a base state (PENDING, RUNNING, ...) and flags, and a flag hides the base
state: a running job that is being sent a signal is SIGNALING until every node has acknowledged it, and
nothing else says that it runs. The words are those of SLURM's `job_state_string`
(src/common/slurm_protocol_defs.c, read up to version 26.11) and of the man page squeue(1), JOB STATE CODES.
"""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """How far a start of a job has come."""

    WAITS = "waits"
    """It has no nodes; SLURM, or a person who releases it, starts it (again)."""
    RUNS = "runs"
    """It has nodes, and nobody has decided that it ends."""
    ENDS = "ends"
    """Its end is decided, by SLURM or by a person; processes of it may still run."""
    OVER = "over"
    """Nothing of it runs, and it does not come back by itself."""


_PHASES = {
    "PENDING": Phase.WAITS,
    "REQUEUED": Phase.WAITS,
    "REQUEUE_FED": Phase.WAITS,
    "REQUEUE_HOLD": Phase.WAITS,
    "SPECIAL_EXIT": Phase.WAITS,  # queued again and held, by `scontrol requeuehold State=SpecialExit`
    "RESV_DEL_HOLD": Phase.WAITS,  # held: its reservation was deleted
    "EXPEDITING": Phase.WAITS,  # queued again, to begin before others
    "RUNNING": Phase.RUNS,
    "CONFIGURING": Phase.RUNS,  # nodes are given, and may still boot
    "POWER_UP_NODE": Phase.RUNS,
    "RESIZING": Phase.RUNS,
    "SIGNALING": Phase.RUNS,  # a signal is on its way; not every node has acknowledged it
    "STOPPED": Phase.RUNS,  # its processes got SIGSTOP; it keeps its CPUs
    "SUSPENDED": Phase.RUNS,  # its processes are stopped and its CPUs lent to others; it goes on
    "UPDATE_DB": Phase.RUNS,  # of its record in the accounting, not of the job
    "COMPLETING": Phase.ENDS,
    "STAGE_OUT": Phase.ENDS,  # files are copied from a burst buffer after its processes
    "BOOT_FAIL": Phase.OVER,
    "CANCELLED": Phase.OVER,
    "COMPLETED": Phase.OVER,
    "DEADLINE": Phase.OVER,
    "FAILED": Phase.OVER,
    "LAUNCH_FAILED": Phase.OVER,
    "NODE_FAIL": Phase.OVER,
    "OUT_OF_MEMORY": Phase.OVER,
    "PREEMPTED": Phase.OVER,
    "RECONFIG_FAIL": Phase.OVER,
    "REVOKED": Phase.OVER,  # another cluster of the federation has started it
    "TIMEOUT": Phase.OVER,
}

KNOWN = frozenset(_PHASES)
"""The words that are decided here."""


def phase_of(state: str) -> Phase:
    """The phase of a job that SLURM still has, by its word for the state.

    A word that is not known is one that a later SLURM has added. It counts as running, the answer that loses
    nothing: a run that is to go on is queued again, which SLURM refuses if it may not be.
    """
    return _PHASES.get(state, Phase.RUNS)
