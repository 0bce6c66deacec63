"""`asyncpp logs`: what a run's processes printed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncpp_cli.errors import UserError
from asyncpp_cli.plain_text import printable_lines

if TYPE_CHECKING:
    from asyncpp_cli.logs import Log
    from asyncpp_cli.runs import Experiment, Run

_INTERRUPTED_CODE = 130


def logs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the experiment.")],
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id of a run, or its beginning.")],
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank",
            metavar="R",
            min=0,
            help="Of this rank; without: the one that failed first, else the one that knows the loss.",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on until the run has ended; Ctrl-C leaves it be.")
    ] = False,
    attempt: Annotated[
        int | None,
        typer.Option("--attempt", metavar="N", min=1, help="Of this attempt; without: the last one."),
    ] = None,
) -> None:
    """Show what a rank of a run printed. The log's name, and those of the others, go to standard error.

    The logs of all attempts are kept, here and on a cluster alike. Control characters are replaced; the files
    have them.
    """
    from asyncpp_cli.runs import chosen_runs, open_experiment

    experiment = open_experiment(folder)
    [chosen] = chosen_runs(experiment, [run])
    try:
        if follow:
            _follow(experiment, chosen, attempt=attempt, rank=rank)
        else:
            _show(experiment, chosen, attempt=attempt, rank=rank)
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED_CODE) from None


def _show(experiment: Experiment, run: Run, *, attempt: int | None, rank: int | None) -> None:
    from asyncpp_cli.cluster.attempts import look
    from asyncpp_cli.logs import interesting, job_output, logs_of

    number = attempt or look(run).attempt
    log = interesting(run, attempt=number, rank=rank) if number else None
    if log is not None:
        _say_files(run, log)
        with log.file.open(encoding="utf-8", errors="replace", newline=None) as file:
            while part := file.read(1 << 16):
                sys.stdout.write(printable_lines(part))
        sys.stdout.flush()
        return
    there = ", ".join(f"attempt {one.attempt} rank {one.rank}" for one in logs_of(run)) or "none"
    output = job_output(experiment, run, attempt=number) if rank is None else None
    if output is None:
        what = f"attempt {number}" if number else "it has not begun"
        of_rank = f", rank {rank}" if rank is not None else ""
        raise UserError(f"{run.id}: no log ({what}{of_rank}); there are: {there}")
    _say(f"{output} (of the job; no rank has printed anything)")
    sys.stdout.write(printable_lines(output.read_text(encoding="utf-8", errors="replace")))
    sys.stdout.flush()


def _follow(experiment: Experiment, run: Run, *, attempt: int | None, rank: int | None) -> None:
    from asyncpp_cli.cluster.attempts import Attempt
    from asyncpp_cli.cluster.outcome import blamed_rank
    from asyncpp_cli.logs import follow

    shown: list[Log] = []

    def say_file(log: Log) -> None:
        shown.append(log)
        _say_files(run, log)

    standing = follow(experiment, run, attempt=attempt, rank=rank, out=sys.stdout, say_file=say_file)
    status = standing.status
    _say(f"{run.id} is {status.state}" + (f": {status.reason}" if status.reason else ""))
    blamed = blamed_rank(Attempt(run, status.attempt)) if status.attempt else None
    if blamed is not None and rank is None and shown and shown[-1].rank != blamed:
        _say(f"rank {blamed} failed first: {run.log_file(attempt=status.attempt, rank=blamed)}")


def _say_files(run: Run, log: Log) -> None:
    from asyncpp_cli.logs import logs_of

    others = [one.file.name for one in logs_of(run) if one != log]
    _say(str(log.file) + (f" (beside it: {', '.join(others)})" if others else ""))


def _say(message: str) -> None:
    from asyncpp_cli.console import say

    say(message)
