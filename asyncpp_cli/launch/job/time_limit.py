"""When a job reaches its time limit, as SLURM reports it."""

from __future__ import annotations

import functools

from asyncpp_cli.launch.slurm import client as slurm

EARLY_SECONDS = 75.0
"""SLURM may signal up to a minute earlier than `signal_lead`."""
CLOCK_TOLERANCE = 2.0
"""Seconds; SLURM's times are whole seconds, and the clocks of machines differ."""


def time_limit(job_id: str) -> float | None:
    """When the job reaches its time limit, in seconds since 1970; None if SLURM does not say."""
    # Preemption moves the end forward, which does not change the limit.
    ends = [end for end in (first_end_time(job_id), slurm.job_end_time(job_id)) if end is not None]
    return max(ends, default=None)


@functools.cache
def first_end_time(job_id: str) -> float | None:
    """End time that SLURM reported when it was first asked; asked when the job starts."""
    return slurm.job_end_time(job_id)
