"""`asyncpp mirror`: copies the metrics of runs to a tracker's format."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncpp_cli.base.errors import UserError, filling
from asyncpp_cli.commands.arguments import ExperimentOrRun
from asyncpp_cli.trackers.catalogue import TRACKERS

if TYPE_CHECKING:
    from asyncpp_cli.runs.run_folder import Run
    from asyncpp_cli.trackers.catalogue import Tracker

SECONDS_BETWEEN_UPDATES = 5.0
"""Pause between updates with `--follow`."""


def mirror(
    folder: ExperimentOrRun,
    name: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="|".join(TRACKERS),
            help="Tracker; wandb: offline runs, to upload with `wandb sync`.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the mirrors; default: DIR/tensorboard, ...")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Update every few seconds until Ctrl-C (tensorboard).")
    ] = False,
) -> None:
    """Copy the metrics of runs to a tracker. The runs' own files remain the source of truth.

    Mirroring again replaces the mirror.
    """
    from asyncpp_cli.base.atomic_files import real_folder
    from asyncpp_cli.base.console import say
    from asyncpp_cli.runs.experiment_folder import EXPERIMENT_FILE, open_experiment, run_at
    from asyncpp_cli.trackers.catalogue import tracker_class
    from stages.config.keys import unknown

    if name not in TRACKERS:
        raise UserError(f"--to: {unknown(name, TRACKERS)}")
    if follow and not tracker_class(name).can_append:
        accepted = ", ".join(known for known in TRACKERS if tracker_class(known).can_append)
        raise UserError(
            f"--follow: a mirror for {name} can only be rewritten, not appended to; accepted: --to {accepted}"
        )
    if (folder / EXPERIMENT_FILE).exists():
        runs = open_experiment(folder).runs
    else:
        runs = [run_at(folder)]
        folder = runs[0].folder
    target = real_folder(out if out is not None else folder / name)
    tracker = tracker_class(name)(target, project=folder.resolve().name)
    try:
        with filling(target):
            rows = [count for run in runs if (count := _update(tracker, run)) is not None]
            say(f"{target}: {sum(rows)} rows of {len(rows)} runs. {tracker.hint}")
            while follow:
                time.sleep(SECONDS_BETWEEN_UPDATES)
                for run in runs:
                    _update(tracker, run)
    except KeyboardInterrupt:
        say("Stopped. Mirroring again continues from here.")


def _update(tracker: Tracker, run: Run) -> int | None:
    """Mirror a run; returns the number of rows. A damaged run is reported and skipped: None."""
    from asyncpp_cli.base.console import say

    try:
        return tracker.update(run)
    except OSError as error:
        if not str(error.filename).startswith(f"{run.folder}/"):
            raise
        say(f"left out: {error.filename} cannot be read ({error.strerror})")
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        say(f"left out: {run.metrics_file} has a malformed row ({error!r})")
    return None
