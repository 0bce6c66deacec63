"""Arguments that several commands take: experiments, runs, settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncpp_cli.completion import experiments, run_folders, runs_of_folder, settings

ExperimentOrRun = Annotated[
    Path,
    typer.Argument(
        metavar="DIR[/RUN]",
        help="An experiment, or a run of it by the beginning of its id.",
        autocompletion=experiments,
    ),
]
MoreRuns = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN", help="More runs; default: all of DIR.", autocompletion=runs_of_folder),
]
OneRun = Annotated[
    Path,
    typer.Argument(metavar="DIR/RUN", help="A run, by the beginning of its id.", autocompletion=run_folders),
]
Changes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings for all cells, as in train.steps=300 or matrix.seed=[0,1].",
        autocompletion=settings,
    ),
]
