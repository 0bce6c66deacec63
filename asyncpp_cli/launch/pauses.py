"""Launches that train runs only up to a step, and pause them there."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from asyncpp_cli.errors import UserError

if TYPE_CHECKING:
    from asyncpp_cli.runs.run_folder import Run
    from stages.config import RunConfig

Pauses = Mapping[str, int]
"""Step after which to pause, by the run's id; runs that are not in it train to the end."""

NO_PAUSES: Pauses = MappingProxyType({})


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
