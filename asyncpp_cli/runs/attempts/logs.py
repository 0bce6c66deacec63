"""The log files of a run's ranks, and which of them to show."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncpp_cli.base.errors import DamagedError
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.outcome import blamed_rank
from asyncpp_cli.runs.run_folder import Run

_NAME = re.compile(r"attempt-(\d+)-rank-(\d+)\.log")


@dataclass(frozen=True, order=True)
class RankLog:
    """Output of one rank in one attempt."""

    attempt: int
    rank: int
    file: Path


def rank_logs(run: Run) -> list[RankLog]:
    """All logs of a run, by attempt and rank."""
    matches = [(match, file) for file in run.logs.glob("*.log") if (match := _NAME.fullmatch(file.name))]
    return sorted(RankLog(int(match[1]), int(match[2]), file) for match, file in matches)


def log_to_show(run: Run, *, attempt: int | None, rank: int | None) -> RankLog | None:
    """The log to show; None if there is none yet.

    Args:
        run: the run.
        attempt: number of the attempt; None: the latest.
        rank: the rank; None: the one that failed first, else the one that prints the loss.
    """
    number = attempt or run.status().attempt
    by_rank = {log.rank: log for log in rank_logs(run) if log.attempt == number}
    if rank is None:
        blamed = blamed_rank(Attempt(run, number)) if by_rank else None
        rank = blamed if blamed in by_rank else _rank_with_the_loss(run, by_rank)
    return by_rank.get(rank)


def _rank_with_the_loss(run: Run, by_rank: Mapping[int, RankLog]) -> int:
    """The rank that prints progress: that of the last stage on the first data rank."""
    try:
        data_ranks = run.config().parallel.data
    except DamagedError:
        data_ranks = 1
    expected = max((rank for rank in by_rank if rank % data_ranks == 0), default=0)
    if expected in by_rank and by_rank[expected].file.stat().st_size == 0:
        # In V-shaped schedules the last stage is on another rank; only that rank prints.
        return max(by_rank, key=lambda rank: (by_rank[rank].file.stat().st_size, rank == expected))
    return expected
