"""When a job reaches its time limit."""

from __future__ import annotations

import functools
import time

from asyncpp_cli.slurm import client as slurm

EARLY_SECONDS = 75.0
"""SLURM may signal up to a minute earlier than `signal_lead`."""
CLOCK_TOLERANCE = 2.0
"""Seconds; SLURM's times are whole seconds, and the clocks of machines differ."""


def time_limit(job_id: str) -> float | None:
    """When the job reaches its time limit, by this machine's monotonic clock; None if SLURM does not say."""
    first, end = first_end_time(job_id), slurm.job_end_time(job_id)
    if first is None:
        return None if end is None else _by_monotonic_clock(end)
    # Preemption moves the end forward, which does not change the limit.
    later = 0.0 if end is None else max(0.0, end - first[0])
    return first[1] + later


@functools.cache
def first_end_time(job_id: str) -> tuple[float, float] | None:
    """End time that SLURM reported when it was first asked, in seconds since 1970, and by this machine's
    monotonic clock; asked when the job starts."""
    end = slurm.job_end_time(job_id)
    return None if end is None else (end, _by_monotonic_clock(end))


def _by_monotonic_clock(at: float) -> float:
    return time.monotonic() + at - time.time()
