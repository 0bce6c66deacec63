"""What a run has cost: hours of GPUs or cores over all its attempts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import Claimed, Outcome
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What runs have cost, with all their attempts: from the claim of each to its end."""

    gpu_hours: float = 0.0
    """Hours of the GPUs that attempts held."""
    core_hours: float = 0.0
    """Hours of the threads of all processes, for attempts without GPUs."""


def total(costs: Iterable[Cost | None]) -> Cost | None:
    """The sum of the costs that are known; None without any."""
    known = [cost for cost in costs if cost is not None]
    if not known:
        return None
    return Cost(
        gpu_hours=math.fsum(cost.gpu_hours for cost in known),
        core_hours=math.fsum(cost.core_hours for cost in known),
    )


def amount(value: float) -> str:
    """A number of hours with three digits, or as a whole number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def cost_text(cost: Cost) -> str:
    """A cost on one line: `3.2 GPU-hours, 1.9 core-hours`."""
    parts = []
    if cost.gpu_hours:
        parts.append(f"{amount(cost.gpu_hours)} GPU-hours")
    if cost.core_hours or not cost.gpu_hours:
        parts.append(f"{amount(cost.core_hours)} core-hours")
    return ", ".join(parts)


def cost_of_run(run: Run, status: Status) -> Cost | None:
    """The cost of a run so far; None if it has not begun, or no attempt recorded its resources.

    Args:
        run: the run.
        status: its status; a running attempt counts up to its latest heartbeat.
    """
    return total(_cost_of_attempt(Attempt(run, number + 1), status) for number in range(status.attempt))


def _cost_of_attempt(attempt: Attempt, status: Status) -> Cost | None:
    claimed = attempt.read(Claimed)
    if claimed is None or (seconds := _seconds(attempt, claimed, status)) is None:
        return None
    hours = seconds / _SECONDS_PER_HOUR
    if claimed.gpus:
        return Cost(gpu_hours=hours * claimed.gpus)
    return Cost(core_hours=hours * claimed.processes * claimed.threads)


def _seconds(attempt: Attempt, claimed: Claimed, status: Status) -> float | None:
    """From the claim of an attempt to its last sign of life; None if unknown."""
    if attempt.number == status.attempt and status.state == State.RUNNING:
        return status.seconds
    outcome = attempt.read(Outcome)
    if outcome is not None and outcome.seconds is None and outcome.last_sign is not None:
        return max(0.0, outcome.last_sign - claimed.claimed)
    return None if outcome is None else outcome.seconds
