"""The options of a launch, which commands, the Python API, this machine and clusters share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from asyncpp_cli.base.errors import UserError

if TYPE_CHECKING:
    from asyncpp_cli.runs.run_folder import Run
    from stages.config.run_config import RunConfig

Pauses = Mapping[str, int]
"""Step after which to pause, by the run's id; runs that are not in it train to the end."""

NO_PAUSES: Pauses = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options that `launch` and `tune` share; on a cluster they override the site profile."""

    replay: Annotated[
        bool, typer.Option("--replay", help="Each run in one process, its ranks taking turns; same numbers.")
    ] = False
    max_parallel: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Runs at a time; default: one core per rank.")
    ] = None
    """None: one core per rank here, no limit on a cluster."""
    retries: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="On a cluster: how often a failed run is started again."),
    ] = None
    """None: as the site says."""
    quiet: Annotated[
        bool, typer.Option("--quiet", help="No line for each run that starts or ends, and no bar.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(TrainOptions):
    """The options of a launch; the annotated fields are those of the command line."""

    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check every cell, and train a small twin of it for a few steps."),
    ] = False
    wait: Annotated[
        bool,
        typer.Option("--wait", help="On a cluster: show progress until all have ended; Ctrl-C ends no run."),
    ] = False
    until: Annotated[
        int | None, typer.Option(metavar="STEP", min=1, max=2**53, help="Pause each run after this step.")
    ] = None
    site: str = "local"
    """Site profile; `local`: this machine."""
    only: Collection[str] | None = None
    """Ids of the runs to consider; None: all."""
    pauses: Pauses = field(default_factory=dict)
    """Steps after which runs pause; from `until`, or those of a tuning's rungs."""
    tell_end: bool = False
    """On a cluster, add a job that runs the site's `on_end`."""


def flags(options: TrainOptions) -> list[str]:
    """The words of a command line for the options that `launch` and `tune` share, without defaults."""
    words = []
    for each in fields(TrainOptions):
        value = getattr(options, each.name)
        if value != each.default:
            words += [f"--{each.name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def check_pause(run: Run, config: RunConfig, pauses: Pauses) -> None:
    """Check that pausing leaves the run's numbers as they are.

    Raises:
        UserError: it does not.
    """
    from stages.config.segments import pauses_exactly

    step = pauses.get(run.id)
    if step is not None and not pauses_exactly(config, step=step):
        raise UserError(
            f"{run.id}: a pause after step {step} would change its numbers, since each drain does under "
            f"{config.schedule.name}; accepted: multiples of train.eval_interval "
            f"({config.train.eval_interval}), where it drains anyway"
        )
