"""What a run's schedule predicts, and rows that its configuration, schedule or other rows contradict."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

import schedules
from asyncpp_cli.report.load.metrics_rows import Metrics
from asyncpp_cli.runs.status import State
from schedules.analyze import analyze
from schedules.costs import uniform_costs
from schedules.simulate import segment_step_time, simulate
from schedules.step_time import StepTime, step_graph_of
from stages.config.run_config import RunConfig
from stages.config.segments import is_sharded, program_options, sync_steps


def fault(
    metrics: Metrics, config: RunConfig, prediction: Prediction | None, *, state: State, from_start: bool
) -> str:
    """The first fault of a run's metrics, on one line; empty if there is none.

    A loss that is not finite is none: a run that diverged has it.

    Args:
        metrics: the run's rows.
        config: its configuration.
        prediction: what its schedule predicts, if that is known.
        state: its state. A completed run has all rows, another those up to where it is.
        from_start: whether it begins at step 0, and continues no other run.
    """
    return (
        _steps(metrics, from_start=from_start)
        or _losses(metrics)
        or _corpus(metrics, config)
        or _delays(metrics, prediction)
        or (_end(metrics, config) if state == State.COMPLETED else "")
    )


def _steps(metrics: Metrics, *, from_start: bool) -> str:
    steps = metrics.steps["step"].to_numpy()
    if not metrics.starts:
        return "" if metrics.is_empty else "it has no start row"
    first = metrics.starts[0].done
    if from_start and first:
        return f"it begins after step {metrics.starts[0].step}; the rows before are missing"
    wrong = np.flatnonzero(steps != np.arange(first + 1, first + 1 + len(steps)))
    if len(wrong):
        index = int(wrong[0])
        return f"its step rows have {steps[index]} where {first + 1 + index} is expected"
    return ""


def _losses(metrics: Metrics) -> str:
    losses = metrics.steps["train_loss"].to_numpy()
    if (negative := np.flatnonzero(losses < 0)).size:
        index = int(negative[0])
        return f"the training loss of step {metrics.steps['step'][index]} is {losses[index]}; losses are >= 0"
    for row in metrics.evaluations:
        losses_of_sets = [(each.val_loss, each.val_loss_ema) for each in (row.sets or {}).values()]
        for loss in (row.val_loss, row.val_loss_ema, *chain(*losses_of_sets)):
            if loss is not None and loss < 0:
                return f"the validation loss of step {row.step} is {loss}; losses are >= 0"
    return ""


def _corpus(metrics: Metrics, config: RunConfig) -> str:
    found = {row.corpus_sha256 for row in metrics.starts if row.corpus_sha256 is not None}
    if config.data.sha256 is not None:
        found.add(config.data.sha256)
    if len(found) > 1:
        return f"its rows are of other data than its configuration: {', '.join(sorted(found))}"
    for described in (row.validation for row in metrics.starts):
        for name, sha256 in config.data.validation_sha256.items():
            if described and (name not in described or described[name].sha256 != sha256):
                return f"its rows are of another validation set {name} than its configuration's"
    return ""


def _delays(metrics: Metrics, prediction: Prediction | None) -> str:
    if prediction is None:
        return ""
    expected = prediction.delays
    for row in metrics.segments:
        measured = row.delay_max
        if len(measured) != len(expected) or any(
            delay is None or not 0 <= delay <= most for delay, most in zip(measured, expected, strict=True)
        ):
            return (
                f"its delay in the segment after step {row.first_step} is {measured} by stage, and its "
                f"schedule's is {list(expected)}"
            )
    return ""


def _end(metrics: Metrics, config: RunConfig) -> str:
    steps = config.train.steps
    last_evaluation = max((row.step for row in metrics.evaluations), default=None)
    if last_evaluation is None:
        return "it has no evaluation although the run is completed"
    if last_evaluation != steps:
        return f"its last evaluation is of step {last_evaluation}, and the run has {steps}"
    start = metrics.starts[0]
    tokens, expected = metrics.steps["tokens"][-1] if len(metrics.steps) else 0, start.tokens_per_step
    if expected is None:
        return "its start row does not say how many tokens a step has"
    if tokens != expected * steps:
        return f"its step rows end after {tokens:,} of {expected * steps:,} tokens"
    trained = sum(row.steps for row in metrics.segments)
    if start.step + trained != steps:
        return f"its segments cover {trained} steps after step {start.step}, and the run has {steps}"
    return ""


MOST_MICROBATCHES = 100_000
"""Limit of simulated forwards over all ranks, so that a report stays quick."""


class Prediction(NamedTuple):
    """What the schedule of a run predicts for equal stages, backwards twice as long as forwards, and messages
    and updates that take no time."""

    bubble: float
    """Share of a step in which a rank waits, mean over ranks, in 0..1, in the long run."""
    of_segment: tuple[int, float] | None
    """Steps of a segment of the run, and the bubble in it, fill and drain aside, where it has not settled."""
    delays: tuple[int, ...]
    """For each stage, the largest delay of a gradient in updates."""


MOST_UNSETTLED = 0.01
"""Share of a step by which the bubble in a segment may differ from that in the long run, unsaid."""


def predicted(config: RunConfig) -> Prediction | None:
    """What the schedule of a run predicts, after the steps that are synchronous whatever it is.

    None where the schedule cannot be built or is too large, for a custom schedule (a report runs no code that
    a folder names), and for one that shards, whose waits follow from its exchanges alone.
    """
    schedule, train = config.schedule, config.train
    if schedules.is_custom(schedule.name) or is_sharded(config):
        return None
    first_step = sync_steps(config)
    intervals = (train.steps - first_step, train.eval_interval, train.checkpoint_interval)
    try:
        options = program_options(config, first_step=first_step, steps=4 + schedule.delay)
        return _predicted(min(filter(None, intervals), default=1), **options)
    except ValueError:
        return None


@lru_cache(maxsize=1024)
def _predicted(segment_steps: int, *, steps: int, **options: Any) -> Prediction | None:
    """By the options of `schedules.build`, and the least steps to try: many runs share a program."""
    forwards = options["stages"] * options["microbatches"]

    def build(steps: int) -> schedules.Program:
        if steps * forwards > MOST_MICROBATCHES:
            raise ValueError("too large")
        return schedules.build(**options, steps=steps)

    graph, program = step_graph_of(build, steps=steps)
    step = graph.step_time(uniform_costs(program))
    of_segment = None
    if _unsettled(program, step) is not None and segment_steps * forwards <= MOST_MICROBATCHES:
        own = _unsettled(build(segment_steps), step)
        of_segment = None if own is None else (segment_steps, own)
    return Prediction(step.bubble, of_segment, analyze(program).delay_max)


def _unsettled(program: schedules.Program, step: StepTime) -> float | None:
    """The bubble in a segment, without fill and drain, where it is not that in the long run."""
    seconds = segment_step_time(simulate(program, uniform_costs(program)))
    if seconds is None:
        return None
    bubble = 1 - (1 - step.bubble) * step.seconds / seconds
    return bubble if abs(bubble - step.bubble) > MOST_UNSETTLED else None
