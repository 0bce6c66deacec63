"""`asyncpp logs`: what a run's processes printed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncpp_cli.base.console import printable_lines
from asyncpp_cli.base.errors import INTERRUPTED, UserError
from asyncpp_cli.commands.arguments import run_words

if TYPE_CHECKING:
    from asyncpp_cli.launch.logs import RankLog
    from asyncpp_cli.runs.experiment_folder import Experiment
    from asyncpp_cli.runs.run_folder import Run


def logs(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR[/RUN]", help="A run, by the beginning of its id.", autocompletion=run_words
        ),
    ],
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="The run, if DIR is given alone."),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            metavar="R",
            min=0,
            help="Rank; default: the one that failed first, else the one that prints the loss.",
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "-f", "--follow", help="Follow, from the run's start to its end; Ctrl-C does not end the run."
        ),
    ] = False,
    attempt: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Attempt; default: the latest.")
    ] = None,
) -> None:
    """Show what a rank of a run printed. The names of the log and of the others go to standard error.

    The logs of all attempts are kept. Control characters are replaced here, not in the files.
    """
    from asyncpp_cli.runs.experiment_folder import runs_named

    experiment, runs = runs_named(folder, [run] if run is not None else [])
    runs = runs or experiment.runs
    if len(runs) != 1:
        raise UserError(f"{folder} names {len(runs)} runs; accepted: one run, DIR/PREFIX of its id")
    [selected] = runs
    try:
        if follow:
            _follow(experiment, selected, attempt=attempt, rank=rank)
        else:
            _show(experiment, selected, attempt=attempt, rank=rank)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _show(experiment: Experiment, run: Run, *, attempt: int | None, rank: int | None) -> None:
    from asyncpp_cli.base.console import say
    from asyncpp_cli.launch.logs import job_output, log_to_show, rank_logs
    from asyncpp_cli.runs.attempts.attempt import Attempt
    from asyncpp_cli.runs.attempts.settle import current_status

    # A damaged status tells no attempt.
    latest = max((log.attempt for log in rank_logs(run)), default=0)
    number = attempt or current_status(run).attempt or latest
    log = log_to_show(run, attempt=number, rank=rank) if number else None
    if log is not None:
        _say_files(run, log)
        if awaited := Attempt(run, log.attempt).awaited():
            say(awaited)
        with log.file.open(encoding="utf-8", errors="replace", newline=None) as file:
            while part := file.read(1 << 16):
                sys.stdout.write(printable_lines(part))
        sys.stdout.flush()
        return
    existing = ", ".join(f"attempt {log.attempt} rank {log.rank}" for log in rank_logs(run)) or "none"
    output = job_output(experiment, run, attempt=number) if rank is None else None
    if output is None:
        wanted = f"attempt {number}" if number else "it has not begun"
        wanted += f", rank {rank}" if rank is not None else ""
        raise UserError(f"{run.id}: no log ({wanted}); there are: {existing}")
    say(f"{output} (of the job; no rank has printed anything)")
    sys.stdout.write(printable_lines(output.read_text(encoding="utf-8", errors="replace")))
    sys.stdout.flush()


def _follow(experiment: Experiment, run: Run, *, attempt: int | None, rank: int | None) -> None:
    from asyncpp_cli.base.console import say
    from asyncpp_cli.launch.logs import follow
    from asyncpp_cli.runs.attempts.attempt import Attempt
    from asyncpp_cli.runs.attempts.outcome import blamed_rank
    from asyncpp_cli.runs.attempts.settle import current_status

    shown: list[RankLog] = []

    def announce(log: RankLog) -> None:
        shown.append(log)
        _say_files(run, log)

    if not current_status(run).attempt:
        say(f"{run.id} has not begun; waiting for its first attempt")
    run_status = follow(experiment, run, attempt=attempt, rank=rank, out=sys.stdout, announce=announce)
    status = run_status.status
    say(f"{run.id} is {status.state}" + (f": {status.reason}" if status.reason else ""))
    latest = Attempt(run, status.attempt)
    blamed = blamed_rank(latest) if status.attempt else None
    if blamed is not None and rank is None and shown and shown[-1].rank != blamed:
        say(f"rank {blamed} failed first: {latest.log_file(blamed)}")


def _say_files(run: Run, log: RankLog) -> None:
    from asyncpp_cli.base.console import say
    from asyncpp_cli.launch.logs import rank_logs

    others = [other.file.name for other in rank_logs(run) if other != log]
    say(str(log.file) + (f" (also: {', '.join(others)})" if others else ""))
