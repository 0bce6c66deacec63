"""How long a step takes: one step simulated, the rest in closed form.

A pipeline that runs evenly needs, for each further micro-batch, the largest mean over a window of
neighbouring stages: stage s has a (p - 1 - s) + 1 micro-batches under way (1F1B: a = 1), so what goes down to
stage j and comes back up may take as long as a (j - s) + 1 micro-batches' turns. Without latency that is the
slowest stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import schedules
from schedules.costs import Costs
from schedules.simulate import simulate

ROUNDS_SIMULATED = 4
"""Of an interleaved step, after which further rounds take equally long."""


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of one micro-batch at each stage, and of one update. Tuples are indexed by stage."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    """What recomputation adds is in it, and in the first half of a backward in halves."""
    input_half: tuple[float, ...]
    weight_half: tuple[float, ...]
    update: tuple[float, ...]
    reduction: tuple[float, ...]
    """The gradient's way over the data ranks, and the weights' way back."""
    message: float
    """What one stage sends another, from its end to its arrival."""

    def whole(self, *, split: bool) -> tuple[float, ...]:
        """A micro-batch's whole computation, with its backward in one piece or in halves."""
        halves = tuple(a + b for a, b in zip(self.input_half, self.weight_half, strict=True))
        backward = halves if split else self.backward
        return tuple(a + b for a, b in zip(self.forward, backward, strict=True))


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A step in the steady state."""

    seconds: float
    bubble: float
    """Share of it in which a rank waits, as a mean over the ranks."""


def step_time(
    name: str,
    times: StageTimes,
    *,
    microbatches: int,
    update_interval: int | None,
    chunks: int = 1,
    ahead: int = 1,
) -> StepTime:
    """The steady state of a schedule.

    Args:
        name: of the schedule.
        times: of its stages.
        microbatches: a step.
        update_interval: of `pipedream` and `paci`: micro-batches between updates; None: the schedule's own.
        chunks: stages a rank, which has those that leave the same rest on division by the ranks.
        ahead: of `2bw`: forwards that a stage runs ahead of its backwards, for each stage behind it.
    """
    schedule = schedules.find(name)
    split = name == "zero-bubble"
    stages = len(times.forward)
    ranks = stages // chunks
    updates = 1
    if schedule.default_interval is not None:
        updates = microbatches // (update_interval or schedule.default_interval(microbatches))
    if schedule.synchronous:
        simulated = microbatches if chunks > 1 else min(microbatches, 2 * stages)
        if chunks > 1 and microbatches % ranks == 0:
            seconds = _interleaved_step(name, times, rounds=microbatches // ranks, chunks=chunks)
        else:
            seconds = _flushed_step(name, times, microbatches=simulated, chunks=chunks)
        if simulated < microbatches:
            each = turn(times, updating=(0.0,) * stages, split=split, phased=name == "gpipe", ahead=1)
            seconds += (microbatches - simulated) * each
    else:
        updating = times.update
        if schedule.default_interval is not None:
            # A stage's next action reads what the update writes: nothing hides the reduction.
            updating = tuple(a + b for a, b in zip(times.update, times.reduction, strict=True))
        share = tuple(updates * update / microbatches for update in updating)
        seconds = microbatches * turn(times, updating=share, split=False, phased=False, ahead=ahead)
        if schedule.default_interval is None:
            # The first reader of an update comes at least that many micro-batches after it.
            slack = max(0, microbatches - ahead * (stages - 1)) * seconds / microbatches
            seconds += max(0.0, max(times.reduction) - slack)
    busy = [
        microbatches * of_stage + updates * update
        for of_stage, update in zip(times.whole(split=split), times.update, strict=True)
    ]
    return StepTime(seconds=seconds, bubble=max(0.0, 1 - sum(busy) / ranks / seconds))


def turn(times: StageTimes, *, updating: tuple[float, ...], split: bool, phased: bool, ahead: int) -> float:
    """Seconds that one more micro-batch takes in a full pipeline.

    Args:
        times: of the stages.
        updating: seconds of updates for each micro-batch, by stage.
        split: the backward comes in halves, of which only the first is waited for.
        phased: all forwards come before all backwards.
        ahead: forwards that a stage runs ahead of its backwards, for each stage behind it.
    """
    if phased:
        return max(times.forward) + max(times.backward)
    # On the way down to a stage and back, weight halves and updates are met at the first stage alone.
    sooner = times.input_half if split else times.backward
    waited = [a + b for a, b in zip(times.forward, sooner, strict=True)]
    once = [a + b for a, b in zip(times.weight_half, updating, strict=True)] if split else updating
    longest = 0.0
    for first in range(len(waited)):
        total = once[first]
        for width, stage in enumerate(waited[first:]):
            total += stage
            longest = max(longest, (total + 2 * times.message * width) / (ahead * width + 1))
            if times.message == 0:
                break
    return longest


def _interleaved_step(name: str, times: StageTimes, *, rounds: int, chunks: int) -> float:
    """A synchronous step of so many rounds, a micro-batch a rank in each."""
    ranks = len(times.forward) // chunks

    def simulated(of_rounds: int) -> float:
        return _flushed_step(name, times, microbatches=of_rounds * ranks, chunks=chunks)

    if rounds <= ROUNDS_SIMULATED + 2:
        return simulated(rounds)
    # Two rounds more, since where ranks differ a longer and a shorter one may come in turn.
    shorter, longer = simulated(ROUNDS_SIMULATED), simulated(ROUNDS_SIMULATED + 2)
    return longer + (rounds - ROUNDS_SIMULATED - 2) * (longer - shorter) / 2


def _flushed_step(name: str, times: StageTimes, *, microbatches: int, chunks: int) -> float:
    """A synchronous step: what a second one takes after the first."""
    ranks = len(times.forward) // chunks
    program = schedules.build(name, stages=ranks, microbatches=microbatches, steps=2, chunks=chunks)
    costs = Costs(
        forward=times.forward,
        backward=times.backward,
        input_half=times.input_half,
        weight_half=times.weight_half,
        update=times.update,
        reduction=times.reduction,
        norm=None,
        latency=times.message,
        transfer=0.0,
        jitter=0.0,
        seed=0,
    )
    timeline = simulate(program, costs)
    first = max(ends[len(ends) // 2 - 1] for ends in timeline.ends)
    return timeline.makespan - first
