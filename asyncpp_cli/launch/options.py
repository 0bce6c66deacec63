"""The options of a launch, which commands, the Python API, this machine and clusters share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from asyncpp_cli.errors import UserError

if TYPE_CHECKING:
    from asyncpp_cli.runs.run_folder import Run
    from stages.config import RunConfig

Pauses = Mapping[str, int]
"""Step after which to pause, by the run's id; runs that are not in it train to the end."""

NO_PAUSES: Pauses = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options of a launch; on a cluster they override the site profile."""

    site: str = "local"
    """Site profile; `local`: this machine."""
    replay: bool = False
    """Each run in one process, its ranks taking turns; the numbers are the same."""
    dry_run: bool = False
    """Only check every cell, and train a small twin of it."""
    max_parallel: int | None = None
    """Number of runs at a time; None: one core per rank here, no limit on a cluster."""
    wait: bool = False
    """On a cluster, stay until all runs have ended."""
    retries: int | None = None
    """On a cluster, how often a failed run is started again; None: as the site says."""
    report: bool = False
    """On a cluster, add a job that writes the report at the end."""
    yes: bool = False
    """Do not ask, whatever the expected cost (`confirm_hours` of the site)."""
    until: int | None = None
    """Step after which each run pauses; None: they train to the end."""
    only: Collection[str] | None = None
    """Ids of the runs to consider; None: all."""
    pauses: Pauses = field(default_factory=dict)
    """Steps after which runs pause; from `until`, or those of a tuning's rungs."""
    tell_end: bool = False
    """On a cluster, add a job that runs the site's `on_end`."""


def check_pause(run: Run, config: RunConfig, pauses: Pauses) -> None:
    """Check that pausing leaves the run's numbers as they are.

    Raises:
        UserError: it does not.
    """
    from stages.pipeline.segments import pauses_exactly

    step = pauses.get(run.id)
    if step is not None and not pauses_exactly(config, step=step):
        raise UserError(
            f"{run.id}: a pause after step {step} would change its numbers, since each drain does under "
            f"{config.schedule.name}; accepted: multiples of train.eval_interval "
            f"({config.train.eval_interval}), where it drains anyway"
        )
