"""`asyncpp quickstart`: sweep, launch and report of a small experiment in one command."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncpp_cli.runs.status import State, Status

if TYPE_CHECKING:
    from asyncpp_cli.runs.run_folder import Run

TEMPLATE = "quickstart"
_FOLDER = "asyncpp-quickstart"


def quickstart(
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the experiment; an existing one is resumed.")
    ] = None,
) -> None:
    """Train six small pipelines and report on them.

    The report says what delay costs in loss and gains in throughput on this machine.

    Same as `sweep`, `launch` and `report` with the template `quickstart`. Nothing is downloaded.
    """
    from asyncpp_cli.base.console import command, say
    from asyncpp_cli.base.errors import INTERRUPTED
    from asyncpp_cli.commands.results.report import report
    from asyncpp_cli.launch.common.options import LaunchOptions
    from asyncpp_cli.launch.start import launch_locally
    from asyncpp_cli.planner.sweeping import sweep_template

    folder = out if out is not None else _new_folder()
    swept = sweep_template(TEMPLATE, [], out=folder, site=None)
    cells, rendered = swept.cells, swept.rendered
    assert rendered is not None
    resume = command("quickstart", "--out", folder)
    say(
        f"{len(cells)} runs of a small language model over a pipeline of two processes, on the text of the\n"
        "Python standard library: the synchronous schedule 1f1b and the asynchronous 2bw, AdamW and\n"
        "Muon, with and without error feedback. About four minutes on two idle cores.\n"
        f"To resume after Ctrl-C: {resume}"
    )
    if rendered.added < len(cells):
        say(f"{folder} exists already: running what is missing.")
    first = [resolved.cell.id for resolved in cells[:2]]
    code = launch_locally(
        rendered.experiment,
        LaunchOptions(),
        remark=(lambda statuses: _what_the_first_showed(statuses, *first)) if len(first) == 2 else None,
        resume=resume,
    )
    if code == INTERRUPTED:
        raise typer.Exit(code)
    report(experiments=[folder])
    say(
        "\nNext:\n"
        f"  {command('report', folder, '--format', 'html', '--out', 'report.html')}\n"
        "                                              a page with curves; also markdown, csv, latex\n"
        f"  {command('sweep', TEMPLATE, 'matrix.seed=[0,1,2]', '--out', folder)} "
        f"&& {command('launch', folder)}\n"
        "                                              two more seeds, for a standard deviation\n"
        f"  {command('templates', 'show', TEMPLATE)}           the template, as a start for one of your own\n"
        f"  {command('schedule', 'show', '2bw', '--stages', '4', '--microbatches', '8')}"
    )
    raise typer.Exit(code)


def _what_the_first_showed(statuses: Sequence[tuple[Run, Status]], synchronous: str, delayed: str) -> str:
    """Sentences on the first two runs, 1f1b and 2bw with one optimizer; empty until both are completed, and
    where they were completed before this launch.

    Args:
        statuses: of the runs of this launch.
        synchronous: id of the run of 1f1b.
        delayed: id of the run of 2bw.
    """
    from asyncpp_cli.report.analysis.conditions import CROWDED
    from stages.rows import Segment

    completed = {run.id: (run, status) for run, status in statuses if status.state == State.COMPLETED}
    if not {synchronous, delayed} <= completed.keys():
        return ""
    (run, status), (delayed_run, delayed_status) = completed[synchronous], completed[delayed]
    losses, delayed_losses = run.validation_losses(), delayed_run.validation_losses()
    if not (losses and delayed_losses and status.tokens_per_second and delayed_status.tokens_per_second):
        return ""
    faster = f"{delayed_status.tokens_per_second / status.tokens_per_second:.2f}"
    segments = (row for each in (run, delayed_run) for row in each.rows() if isinstance(row, Segment))
    speed = f"With Muon, 2bw trains on {faster} times as many tokens per second as 1f1b."
    if any((segment.load_per_core or 0.0) > CROWDED for segment in segments):
        speed = f"The machine was busy: do not trust its speeds ({faster} times those of 1f1b)."
    loss, delayed_loss = losses[max(losses)], delayed_losses[max(delayed_losses)]
    return (
        f"{speed}\nThe validation loss of 2bw is {delayed_loss:.3f}, that of 1f1b {loss:.3f}. "
        "Next: error feedback, then AdamW."
    )


def _new_folder() -> Path:
    """The first of asyncpp-quickstart, asyncpp-quickstart-2, ... that does not exist."""
    further = (Path(f"{_FOLDER}-{number}") for number in count(2))
    return next(folder for folder in chain([Path(_FOLDER)], further) if not folder.exists())
