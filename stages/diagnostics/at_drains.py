"""The row of `train.diagnostics`, measured at drains with an evaluation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from optimizers import CORRECTIONS, check_options, is_custom
from optimizers.theory.limits import momentum_limit
from stages.comm.json_data import from_json
from stages.config.run_config import RunConfig, optimizer_options, tokens_per_step
from stages.config.segments import schedule_facts
from stages.diagnostics.measure import Turn, curvature, turns, update_cosines
from stages.liveness.watchdog import ActivityTracker
from stages.metrics.row_writer import Rows
from stages.pipeline.build import Rank
from stages.pipeline.drain_meetings import DrainMeetings
from stages.update.lr_schedule import learning_rate_factor


class Diagnostics:
    """Measures a run every `train.diagnostics` steps.

    Args:
        config: of the run.
        ranks: those of this process.
        meetings: of this process with the others.
        rows: receives the row.
        doing: told of each gradient of the held batch.
    """

    def __init__(
        self,
        config: RunConfig,
        ranks: Sequence[Rank],
        *,
        meetings: DrainMeetings,
        rows: Rows,
        doing: ActivityTracker,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._meetings = meetings
        self._rows = rows
        self._doing = doing

    def measure(self, step: int, *, seconds: float) -> None:
        """Write the row after `step` steps and `seconds` of training, if one is due. All ranks call this."""
        interval = self._config.train.diagnostics
        if interval == 0 or step % interval:
            return
        started = time.perf_counter()
        collected = self._meetings.at_writer([turn for rank in self._ranks for turn in turns(rank)])
        if collected is None:
            return
        every_turn = from_json(list[Turn], collected)
        cosine, by_stage = update_cosines(every_turn)
        config = self._config
        row = {
            "kind": "diagnostics",
            "step": step,
            "tokens": step * tokens_per_step(config),
            "lr": config.optimizer.lr
            * learning_rate_factor(config.optimizer, step=step - 1, steps=config.train.steps),
            "limit": limit(config, step=step, delay=max(turn.delay for turn in every_turn)),
            "update_cosine": cosine,
            "update_cosine_by_stage": by_stage,
            **self._curvature(),
            "seconds": seconds,
            "diagnostics_seconds": time.perf_counter() - started,
        }
        self._rows.write(row)

    def _curvature(self) -> dict[str, float | None]:
        """The fields that need the whole model; None where other processes hold a part of it."""
        stages, data = schedule_facts(self._config).stages, self._config.parallel.data
        held = [state for rank in self._ranks for state in rank.stages.values()]
        by_stage = [[rank.stages[s] for rank in self._ranks if s in rank.stages] for s in range(stages)]
        values = None
        if len(held) == stages * data:
            values = curvature(
                by_stage,
                self._ranks[0].batches,
                eval_microbatches=self._config.train.eval_microbatches,
                on_gradient=partial(self._doing.begin, "measuring curvature"),
            )
        names = ("lr_sharpness", "residual", "lr_sharpness_along_update", "gradient_cosine")
        return {name: None if values is None else getattr(values, name) for name in names}


def limit(config: RunConfig, *, step: int, delay: int) -> float | None:
    """The stability limit of the run's momentum after `step` steps at this delay; None: it is unknown."""
    optimizer, correction = config.optimizer, CORRECTIONS.get(config.correction.name)
    if is_custom(optimizer.name) or (correction is not None and not correction.synchronous_start):
        return None
    return momentum_limit(
        optimizer.name,
        check_options(optimizer.name, optimizer_options(optimizer)),
        step=step,
        delay=delay,
        coefficient=config.error_feedback.coefficient,
    )
