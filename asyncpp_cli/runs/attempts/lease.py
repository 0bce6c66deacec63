"""The lease of an attempt's ranks: who runs a rank touches the file of its start, again and again.

Where processes cannot be checked, on other machines and in other containers, a rank whose file is older than
the lease is lost (`Run.age`: no two clocks are compared). A process that was only frozen finds the next
attempt's folder, and writes nothing any more (`runs.recorder`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from asyncpp_cli.base.errors import TakenOverError
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import RankEnd, RankStart
from asyncpp_cli.runs.processes import is_gone
from asyncpp_cli.runs.run_folder import modified

RENEWALS = 6
"""Number of renewals within a lease."""


def renew(attempt: Attempt, ranks: Iterable[int]) -> None:
    """Show that these ranks are still run."""
    for rank in ranks:
        # The file server may be away for a moment, and the folder removed.
        with contextlib.suppress(OSError):
            os.utime(attempt.file(RankStart, rank))


def renewed_at(attempt: Attempt) -> dict[int, float]:
    """When each rank was started or last renewed, by the file server's clock."""
    times = {}
    for rank in attempt.ranks_with(RankStart):
        with contextlib.suppress(OSError):
            times[rank] = modified(attempt.file(RankStart, rank))
    return times


def last_sign(attempt: Attempt) -> float | None:
    """Seconds since a rank showed that it runs; None if all have ended, or are gone from this machine."""
    ages = [
        attempt.run.age(attempt.file(RankStart, rank))
        for rank in attempt.ranks_with(RankStart) - attempt.ranks_with(RankEnd)
        if not all(map(is_gone, attempt.processes(rank)))
    ]
    return min(ages, default=None)


def is_superseded(attempt: Attempt) -> bool:
    """Whether the next attempt has begun."""
    try:
        # Listed, because a network file system may remember that a name was missing.
        return str(attempt.number + 1) in os.listdir(attempt.run.attempts)  # noqa: PTH208
    except OSError:
        return False


def taken_over(attempt: Attempt) -> TakenOverError:
    """The error of an attempt that `is_superseded`."""
    return TakenOverError(
        f"{attempt.run.folder}: attempt {attempt.number} was given up, because this machine was silent for "
        f"longer than site.lease; attempt {attempt.number + 1} has begun, and this one ends"
    )
