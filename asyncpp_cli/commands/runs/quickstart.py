"""`asyncpp quickstart`: sweep, launch and report of a small experiment in one command."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
    from asyncpp_cli.launch.expected import expected_line
    from asyncpp_cli.launch.start import launch_locally
    from asyncpp_cli.planner.sweeping import sweep_template

    folder = out if out is not None else _new_folder()
    swept = sweep_template(TEMPLATE, [], out=folder, site=None)
    cells, rendered = swept.cells, swept.rendered
    assert rendered is not None
    say(
        f"{len(cells)} runs of a small language model over a pipeline of two processes, on the text of the\n"
        "Python standard library: the synchronous schedule 1f1b and the asynchronous 2bw, AdamW and\n"
        "Muon, with and without error feedback. About four minutes on two idle cores.\n"
        f"To resume after Ctrl-C: {command('quickstart', '--out', folder)}"
    )
    if rendered.added < len(cells):
        say(f"{folder} exists already: running what is missing.")
    elif line := expected_line([resolved.config for resolved in cells]):
        say(line)
    runs = {run.id: run for run in rendered.experiment.runs}
    first = [runs[resolved.cell.id] for resolved in cells[:2]]
    code = launch_locally(rendered.experiment, LaunchOptions(only=[run.id for run in first]), told=True)
    if code != INTERRUPTED:
        _say_what_the_first_showed(first)
        code = launch_locally(rendered.experiment, LaunchOptions(), told=True)
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


def _say_what_the_first_showed(first: Sequence[Run]) -> None:
    """A line on the first two runs, 1f1b and 2bw with one optimizer; none if one has not ended."""
    from asyncpp_cli.base.console import say

    losses = [run.validation_losses() for run in first]
    rates = [run.status().tokens_per_second for run in first]
    if len(first) < 2 or not (all(losses) and all(rates)):
        return
    before, after = (of_run[max(of_run)] for of_run in losses)
    faster = (rates[1] or 0.0) / (rates[0] or 1.0)
    say(
        f"With Muon, 2bw trains on {faster:.2f} times as many tokens per second as 1f1b.\n"
        f"Its validation loss is {after:.3f}, that of 1f1b {before:.3f}. Next: error feedback, then AdamW."
    )


def _new_folder() -> Path:
    """The first of asyncpp-quickstart, asyncpp-quickstart-2, ... that does not exist."""
    further = (Path(f"{_FOLDER}-{number}") for number in count(2))
    return next(folder for folder in chain([Path(_FOLDER)], further) if not folder.exists())
