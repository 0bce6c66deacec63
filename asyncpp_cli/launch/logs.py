"""The logs of a run's ranks: which of them to show, and following one while it grows, across attempts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from asyncpp_cli.base.console import printable_lines
from asyncpp_cli.base.errors import DamagedError
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.outcome import blamed_rank
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State
from asyncpp_cli.slurm.run_status import RunStatus, SlurmQueue, output_file
from stages.config.places import Places
from stages.resolve.facts import facts

_POLL_SECONDS = 0.3
_SECONDS_BETWEEN_STATUSES = 1.0


def job_output(experiment: Experiment, run: Run, *, attempt: int) -> Path | None:
    """Output of an attempt's SLURM job, of the latest job if no attempt has begun (0); None if missing."""
    job = Attempt(run, attempt).job if attempt else None
    if job is not None:
        file = experiment.submissions / job.submission / f"{job.id}.out"
        return file if file.exists() else None
    task = SlurmQueue(experiment).submissions.array_tasks.get(run.id)
    if task is None or not task.array.id:
        return None
    file = output_file(task)
    return file if file.exists() else None


def follow(
    experiment: Experiment,
    run: Run,
    *,
    attempt: int | None,
    rank: int | None,
    out: TextIO,
    announce: Callable[[RankLog], None],
) -> RunStatus:
    """Write out a run's log, from its beginning until the run has ended.

    Args:
        experiment: the run's experiment.
        run: the run.
        attempt: number of the only attempt to follow; None: the latest and those after it.
        rank: the rank; None: see `log_to_show`.
        out: where to write.
        announce: called with each log before its content.

    Returns:
        The run's status at the end.
    """
    current: RankLog | None = None
    content: Iterator[str] = iter(())
    status_time = 0.0
    run_status = SlurmQueue(experiment).run_status(run, with_accounting=False)
    while True:
        over = _is_over(run_status, attempt)
        # Stay with the rank being followed, even if another one fails.
        followed_rank = current.rank if rank is None and current else rank
        latest = log_to_show(run, attempt=attempt, rank=followed_rank)
        if latest is not None and (current is None or latest.attempt != current.attempt):
            _write_new(content, out)
            current = latest
            announce(current)
            content = _growing(current.file)
        _write_new(content, out)
        if over:
            return run_status
        time.sleep(_POLL_SECONDS)
        if time.monotonic() - status_time > _SECONDS_BETWEEN_STATUSES:
            status_time = time.monotonic()
            run_status = SlurmQueue(experiment).run_status(run, with_accounting=False)


def _is_over(run_status: RunStatus, attempt: int | None) -> bool:
    """Whether no more output is to come."""
    status = run_status.status
    if attempt is not None and status.attempt > attempt:
        return True
    if status.state in (State.RUNNING, State.PENDING):
        return False
    # While SLURM has a job for the run, another attempt follows.
    return not run_status.has_job or (attempt is not None and status.attempt == attempt)


def _write_new(content: Iterator[str], out: TextIO) -> None:
    for part in content:
        if not part:
            break
        out.write(printable_lines(part))
    out.flush()


def _growing(file: Path) -> Iterator[str]:
    """A file's content part by part; an empty part when there is no more for now."""
    with file.open(encoding="utf-8", errors="replace", newline="") as opened:
        while True:
            yield opened.read(1 << 16)


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
        rank = blamed if blamed in by_rank else _rank_with_the_loss(Attempt(run, number), by_rank)
    return by_rank.get(rank)


def _rank_with_the_loss(attempt: Attempt, by_rank: Mapping[int, RankLog]) -> int:
    """The rank that prints progress: that of the last stage on the first data rank."""
    try:
        parallel = facts(attempt.run.config()).config.parallel
        places = Places(parallel.stages, parallel.data, attempt.site().neighbours)
    except DamagedError:
        places = Places(len(by_rank), 1)
    expected = max((rank for rank in by_rank if places.of(rank)[1] == 0), default=0)
    if expected in by_rank and by_rank[expected].file.stat().st_size == 0:
        # In V-shaped schedules the last stage is on another rank; only that rank prints.
        return max(by_rank, key=lambda rank: (by_rank[rank].file.stat().st_size, rank == expected))
    return expected
