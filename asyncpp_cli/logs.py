"""The logs of a run, attempt by attempt: which is of interest, and following one as it grows."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from asyncpp_cli.cluster.attempts import Attempt
from asyncpp_cli.cluster.outcome import blamed_rank
from asyncpp_cli.cluster.queue import Queue, Standing
from asyncpp_cli.cluster.unclaimed import output_file
from asyncpp_cli.errors import DamagedError
from asyncpp_cli.plain_text import printable_lines
from asyncpp_cli.runs import Experiment, Run, State

_SECONDS_BETWEEN_LOOKS = 0.3
_SECONDS_BETWEEN_STATES = 1.0
_NAME = re.compile(r"attempt-(\d+)-rank-(\d+)\.log")


@dataclass(frozen=True, order=True)
class Log:
    """What one rank of one attempt printed."""

    attempt: int
    rank: int
    file: Path


def logs_of(run: Run) -> list[Log]:
    """All of a run's, by attempt and rank."""
    found = [(match, file) for file in run.logs.glob("*.log") if (match := _NAME.fullmatch(file.name))]
    return sorted(Log(int(match[1]), int(match[2]), file) for match, file in found)


def interesting(run: Run, *, attempt: int | None, rank: int | None) -> Log | None:
    """The log to show, if there is one yet.

    Args:
        run: whose.
        attempt: number; None: the last one.
        rank: None: the one that failed first, else the one that knows the loss.
    """
    number = attempt or run.status().attempt
    there = {log.rank: log for log in logs_of(run) if log.attempt == number}
    if rank is None:
        blamed = blamed_rank(Attempt(run, number)) if there else None
        rank = blamed if blamed in there else _rank_with_the_loss(run, there)
    return there.get(rank)


def _rank_with_the_loss(run: Run, there: Mapping[int, Log]) -> int:
    """The rank that prints how far the run is: of the last stage, on the first data rank."""
    try:
        data_ranks = run.config().parallel.data
    except DamagedError:
        data_ranks = 1
    expected = max((rank for rank in there if rank % data_ranks == 0), default=0)
    if expected in there and there[expected].file.stat().st_size == 0:
        # Where stages turn round in a V the last one is elsewhere; only that rank prints.
        return max(there, key=lambda rank: (there[rank].file.stat().st_size, rank == expected))
    return expected


def job_output(experiment: Experiment, run: Run, *, attempt: int) -> Path | None:
    """What the job of an attempt printed beside the ranks' logs, or the last job where none has begun."""
    queue = Queue(experiment)
    job = Attempt(run, attempt).job if attempt else None
    if job is not None:
        file = experiment.submissions / job.submission / f"{job.id}.out"
        return file if file.exists() else None
    place = queue.submissions.places.get(run.id)
    if place is None or not place.array.id:
        return None
    file = output_file(place)
    return file if file.exists() else None


def follow(
    experiment: Experiment,
    run: Run,
    *,
    attempt: int | None,
    rank: int | None,
    out: TextIO,
    say_file: Callable[[Log], None],
) -> Standing:
    """Write out what a run prints until it has ended, with what it has printed already.

    Args:
        experiment: that it belongs to.
        run: which.
        attempt: only this one; None: those that follow, too.
        rank: which; None: as `interesting` says.
        out: where.
        say_file: is told of each log before its content.

    Returns:
        How the run stands at the end.
    """
    current: Log | None = None
    printed: Iterator[str] = iter(())
    looked = 0.0
    standing = Queue(experiment).standing(run, with_accounting=False)
    while True:
        over = _is_over(standing, attempt)
        # A rank that is followed is not left for another because that one failed.
        of_rank = current.rank if rank is None and current else rank
        latest = interesting(run, attempt=attempt, rank=of_rank)
        if latest is not None and (current is None or latest.attempt != current.attempt):
            _pass_on(printed, out)
            current = latest
            say_file(current)
            printed = _growing(current.file)
        _pass_on(printed, out)
        if over:
            return standing
        time.sleep(_SECONDS_BETWEEN_LOOKS)
        if time.monotonic() - looked > _SECONDS_BETWEEN_STATES:
            looked = time.monotonic()
            standing = Queue(experiment).standing(run, with_accounting=False)


def _is_over(standing: Standing, attempt: int | None) -> bool:
    """Whether nothing more is to come."""
    status = standing.status
    if attempt is not None and status.attempt > attempt:
        return True
    if status.state == State.RUNNING:
        return False
    # Where SLURM has a job for it, another attempt is to come.
    return not standing.has_job or (attempt is not None and status.attempt == attempt)


def _pass_on(printed: Iterator[str], out: TextIO) -> None:
    for part in printed:
        if not part:
            break
        out.write(printable_lines(part))
    out.flush()


def _growing(file: Path) -> Iterator[str]:
    """What a file holds, part by part; an empty one where there is no more for now."""
    with file.open(encoding="utf-8", errors="replace", newline="") as opened:
        while True:
            yield opened.read(1 << 16)
