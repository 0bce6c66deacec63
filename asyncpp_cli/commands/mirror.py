"""`asyncpp mirror`: what runs measured, in the form of a tracker."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncpp_cli.errors import UserError

if TYPE_CHECKING:
    from asyncpp_cli.runs import Run

SECONDS_BETWEEN_LOOKS = 5.0


class Tracker(StrEnum):
    """Where to."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"


def mirror(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of an experiment, or of one run.")],
    tracker: Annotated[
        Tracker, typer.Option("--to", help="Which tracker; wandb: offline, for `wandb sync`.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where to; otherwise DIR/tensorboard or DIR/wandb."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="tensorboard: go on until Ctrl-C, every few seconds.")
    ] = False,
) -> None:
    """Mirror the metrics of runs into a tracker. The run's own files stay the truth.

    Mirroring again brings the mirror up to date; nothing is in it twice.
    """
    from asyncpp_cli.console import say
    from asyncpp_cli.runs import EXPERIMENT_FILE, open_experiment, open_run

    runs = open_experiment(folder).runs if (folder / EXPERIMENT_FILE).exists() else [open_run(folder)]
    target = out if out is not None else folder / str(tracker)
    if tracker is Tracker.WANDB:
        if follow:
            raise UserError("--follow: an offline run of W&B cannot be added to; accepted: --to tensorboard")
        rows = _to_wandb(runs, target, project=folder.resolve().name)
        say(f"{target}: {rows} rows of {len(runs)} runs. Upload: wandb sync {target}/wandb/offline-run-*")
        return
    _to_tensorboard(runs, target, follow=follow)


def _to_wandb(runs: list[Run], target: Path, *, project: str) -> int:
    from asyncpp_cli.trackers import wandb

    return sum(_rows(run, functools.partial(wandb.mirror, run, target, project=project)) for run in runs)


def _rows(run: Run, mirror_it: Callable[[], int]) -> int:
    """Rows of a run that were mirrored; none of one that is damaged, for the others have theirs."""
    from asyncpp_cli.console import say

    try:
        return mirror_it()
    except OSError as error:
        if not str(error.filename).startswith(f"{run.folder}/"):
            raise
        say(f"left out: {error.filename} cannot be read ({error.strerror})")
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        say(f"left out: {run.metrics_file} has a row of another form ({error!r})")
    return 0


def _to_tensorboard(runs: list[Run], target: Path, *, follow: bool) -> None:
    from asyncpp_cli.console import say
    from asyncpp_cli.trackers.tensorboard import EventFile

    files = [(run, EventFile(run, target / run.id)) for run in runs]
    rows = sum(_rows(run, file.update) for run, file in files)
    say(f"{target}: {rows} rows of {len(runs)} runs. Look at them: tensorboard --logdir {target}")
    try:
        while follow:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            for run, file in files:
                _rows(run, file.update)
    except KeyboardInterrupt:
        say("Stopped; mirroring again goes on from here.")
