"""Step time of a schedule: a step of few micro-batches played, further micro-batches in closed form.

In the steady state, each further micro-batch takes the largest mean over a window of neighbouring stages:
stage s has a (p - 1 - s) + 1 micro-batches in flight (1F1B: a = 1), so the round trip from stage s to stage j
may take as long as a (j - s) + 1 micro-batches. Without latency the largest mean is the slowest stage.

Once per step, the critical path passes the update of one stage. Which one, and whether there is room to hide
a reduction, depends on all stages where a step has hardly more micro-batches than stages: so that is played.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import add, itemgetter, sub
from statistics import fmean

import schedules
from asyncpp_cli.planner.kept import kept
from asyncpp_cli.planner.representative import (
    STEPS_MEASURED,
    Shape,
    Span,
    seconds_of_step,
    steady_span,
    traits,
)
from schedules.costs import Costs
from schedules.simulate import simulate, throughput
from stages.config.run_config import RunConfig

FLUSHED_ROUNDS = 3
"""Micro-batches per stage of a synchronous step to simulate; further ones wait for the slowest stages."""
ROUNDS_SIMULATED = 4
"""Rounds of an interleaved step to simulate; further rounds take equally long."""
FLUSHED_SHARDED_ROUNDS, FLUSHED_MICROBATCHES = 8, 24
"""Rounds, each of one micro-batch per rank, and micro-batches to simulate at least of a synchronous step with
shards of the head."""
ROUNDS_EXTRAPOLATED = 4
"""Rounds of it that others are taken to be like: longer and shorter ones may alternate."""
BUSY_LINK = 0.5
"""Share of its time from which a link's messages are taken to wait for one another. A rank with several
stages sends as many messages for each micro-batch as all of them; below this share they hardly meet."""


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of a micro-batch and of an update at each stage. Tuples are indexed by stage."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    """Recomputation counts here, and in `input_half` of a split backward."""
    input_half: tuple[float, ...]
    weight_half: tuple[float, ...]
    update: tuple[float, ...]
    reduction: tuple[float, ...]
    """Reduce-scatter of gradients and all-gather of weights over the data ranks."""
    message: float
    """A message between stages, from the end of the action that sends it to its arrival."""
    head: tuple[float, ...] = ()
    """Of shards of the head: the logits and the gradient of its input; 0 for other stages. Empty if the head
    is in the last stage."""
    head_weight: tuple[float, ...] = ()
    """Likewise, the gradient of its weights."""
    embed: tuple[float, ...] = ()
    """Of shards that embedding and head share: a look-up; 0 for other stages. Empty if there are none."""
    embed_weight: tuple[float, ...] = ()
    """Likewise, its gradient."""

    def whole(self, *, split: bool) -> tuple[float, ...]:
        """Forward and backward of a micro-batch, the backward whole or split."""
        halves = tuple(a + b for a, b in zip(self.input_half, self.weight_half, strict=True))
        backward = halves if split else self.backward
        return tuple(a + b for a, b in zip(self.forward, backward, strict=True))

    @property
    def of_shards(self) -> tuple[float, ...]:
        """Of shards of the head, all that they do; empty if there are none."""
        none = (0.0,) * len(self.head)
        kinds = (self.head, self.head_weight, self.embed or none, self.embed_weight or none)
        return tuple(map(sum, zip(*kinds, strict=True)))

    def of_microbatch(self, *, split: bool) -> float:
        """All that a micro-batch takes, over all stages and shards."""
        return sum(self.whole(split=split)) + sum(self.of_shards)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A step in the steady state."""

    seconds: float
    bubble: float
    """Share of the step in which a rank waits, averaged over the ranks."""


def step_time(
    name: str,
    times: StageTimes,
    *,
    microbatches: int,
    update_interval: int | None,
    chunks: int = 1,
    ahead: int = 1,
    delay: int | None = None,
) -> StepTime:
    """The steady state of a built-in schedule.

    Args:
        name: name of the schedule.
        times: times of its stages.
        microbatches: micro-batches per step.
        update_interval: `pipedream`, `paci`: micro-batches between updates; None: the schedule's default.
        chunks: stages per rank.
        ahead: `2bw`: forwards that a stage runs ahead of its backwards, for each stage after it.
        delay: `2bw`: as in `schedules.build`.
    """
    schedule = schedules.find(name)
    stages = len(times.forward)
    ranks = stages // chunks
    split = False
    updates = 1
    if schedule.default_interval is not None:
        updates = microbatches // (update_interval or schedule.default_interval(microbatches))
    if schedule.synchronous:
        split, _ = traits(name)
        if chunks > 1 and microbatches % ranks == 0:
            seconds = _interleaved_step(name, times, rounds=microbatches // ranks, chunks=chunks)
        else:
            further, period = turn(times, split=split, phased=not schedule.bounded_activations, ahead=1)
            simulated, enough = microbatches, FLUSHED_ROUNDS * stages
            if chunks == 1 and microbatches > enough:
                # So many that the others are whole round trips, each of which takes as long.
                simulated = enough + (microbatches - enough) % period
            seconds = _flushed_step(name, times, microbatches=simulated, chunks=chunks)
            seconds += (microbatches - simulated) * further
    elif schedule.default_interval is not None:
        interval = microbatches // updates
        # The next action reads the updated weights, so nothing hides the reduction.
        updating = tuple(a + b for a, b in zip(times.update, times.reduction, strict=True))
        unhidden = replace(times, update=updating, reduction=(0.0,) * stages)
        seconds = _unflushed_step(unhidden, microbatches=microbatches, interval=interval, ahead=1, delay=None)
    else:
        if delay is None:
            delay = schedules.smallest_delay(name, stages=stages, microbatches=microbatches, ahead=ahead)
        seconds = _unflushed_step(
            times, microbatches=microbatches, interval=microbatches, ahead=ahead, delay=delay
        )
    busy = [
        microbatches * microbatch + updates * update
        for microbatch, update in zip(times.whole(split=split), times.update, strict=True)
    ]
    return StepTime(seconds=seconds, bubble=max(0.0, 1 - sum(busy) / ranks / seconds))


def turn(times: StageTimes, *, split: bool, phased: bool, ahead: int) -> tuple[float, int]:
    """Seconds that each further micro-batch takes in a full pipeline, and of how many that is the mean.

    Args:
        times: times of the stages.
        split: whether backwards are split; other stages then wait for the input half only.
        phased: whether all forwards run before all backwards.
        ahead: forwards that a stage runs ahead of its backwards, for each stage after it.
    """
    if phased:
        return max(times.forward) + max(times.backward), 1
    # In a round trip, weight halves delay the first stage only.
    waited_for = times.input_half if split else times.backward
    round_trip = [a + b for a, b in zip(times.forward, waited_for, strict=True)]
    longest, period = 0.0, 1
    for first in range(len(round_trip)):
        total = times.weight_half[first] if split else 0.0
        for width, stage in enumerate(round_trip[first:]):
            total += stage
            longest, period = max(
                (longest, period),
                ((total + 2 * times.message * width) / (ahead * width + 1), ahead * width + 1),
                key=itemgetter(0),
            )
            if times.message == 0:
                break
    return longest, period


def _unflushed_step(
    times: StageTimes, *, microbatches: int, interval: int, ahead: int, delay: int | None
) -> float:
    """Seconds of a step of 1F1B that is never flushed.

    Args:
        times: times of its stages.
        microbatches: micro-batches per step.
        interval: micro-batches between updates, a divisor of `microbatches`.
        ahead: forwards that a stage runs ahead of its backwards, for each stage after it.
        delay: steps between a stage's update and the first forward that reads its weights; reductions and
            the norm are hidden in what lies between. None: each stage updates by itself, at once.
    """
    lead = ahead * (len(times.forward) - 1)
    further, _ = turn(times, split=False, phased=False, ahead=ahead)
    enough = 2 * (lead + 1) + math.ceil(max(times.reduction) / further)
    if microbatches <= enough:
        return _played_step(times, microbatches=microbatches, interval=interval, ahead=ahead, delay=delay)
    if interval < microbatches:
        played = interval * -(-enough // interval)
        seconds = _played_step(times, microbatches=played, interval=interval, ahead=ahead, delay=delay)
        return seconds * microbatches / played
    # So many that the others are whole round trips.
    played = enough + (microbatches - enough) % (lead + 1)
    seconds = _played_step(times, microbatches=played, interval=played, ahead=ahead, delay=delay)
    return seconds + (microbatches - played) * further


@kept
def _played_step(
    times: StageTimes, *, microbatches: int, interval: int, ahead: int, delay: int | None
) -> float:
    """As `_unflushed_step`, by playing pairs of a forward and a backward, which all stages do in turn."""
    stages, message = len(times.forward), times.message
    forward, backward = list(enumerate(times.forward)), list(enumerate(times.backward))[::-1]
    lead = ahead * (stages - 1)
    # By pairs since a gradient was completed: the stages that perform their update then.
    performing: dict[int, list[int]] = {}
    for stage in range(stages):
        hidden_in = 0 if delay is None else min(delay * interval - (lead - ahead * stage), interval)
        performing.setdefault(hidden_in, []).append(stage)
    clock, known = [0.0] * stages, 0.0
    # Of each pair that a later stage still has to read: when its activations arrive at the next stage.
    arrivals = [[0.0] * (stages + 1) for _ in range(ahead)]
    fill = -(-(lead + 1) // microbatches)
    ends = []
    for pair in range((fill + 1 + STEPS_MEASURED) * microbatches):
        arrived = arrivals[pair % ahead]
        arriving = [0.0]
        for stage, seconds in forward:
            start = arrived[stage] if arrived[stage] > clock[stage] else clock[stage]
            clock[stage] = start + seconds
            arriving.append(clock[stage] + message)
        arrivals[pair % ahead] = arriving
        gradient = 0.0
        for stage, seconds in backward:
            start = gradient if gradient > clock[stage] else clock[stage]
            clock[stage] = start + seconds
            gradient = clock[stage] + message
        if (pair + 1) % microbatches == 0:
            ends.append(tuple(clock))
        past = (pair + 1) % interval
        for stage in performing.get(past or interval, ()):
            clock[stage] = max(clock[stage], known) + times.update[stage]
        if past == 0:
            # None steps before all have their gradient.
            known = max(map(add, clock, times.reduction))
            for stage in performing.get(0, ()):
                clock[stage] = (clock[stage] if delay is None else known) + times.update[stage]
    # A rank with less work may still be catching up.
    elapsed: float = max(map(sub, ends[-1], ends[-1 - STEPS_MEASURED]))
    return elapsed / STEPS_MEASURED


def _interleaved_step(name: str, times: StageTimes, *, rounds: int, chunks: int) -> float:
    """Seconds of a synchronous step of `rounds` rounds, each of one micro-batch per rank."""
    ranks = len(times.forward) // chunks

    def simulated(count: int) -> float:
        return _flushed_step(name, times, microbatches=count * ranks, chunks=chunks)

    if rounds <= ROUNDS_SIMULATED + 2:
        return simulated(rounds)
    # Where ranks differ, longer and shorter rounds may alternate: extrapolate from two rounds.
    shorter, longer = simulated(ROUNDS_SIMULATED), simulated(ROUNDS_SIMULATED + 2)
    return longer + (rounds - ROUNDS_SIMULATED - 2) * (longer - shorter) / 2


def _flushed_step(name: str, times: StageTimes, *, microbatches: int, chunks: int) -> float:
    """Seconds of a synchronous step: the second of two."""
    ranks = len(times.forward) // chunks
    span = _two_steps(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    return _seconds(span, times, split=traits(name)[0])


def _two_steps(
    name: str, *, ranks: int, microbatches: int, chunks: int, shard_head: bool = False, tied: bool = False
) -> Span:
    """The second of two synchronous steps."""
    shape = Shape(
        name=name,
        stages=ranks,
        microbatches=microbatches,
        options=(("chunks", chunks),),
        shard_head=shard_head,
        tied_shards=tied and shard_head,
        several_data_ranks=False,
        on_gpu=False,
    )
    return Span(shape, steps=2, first=0, last=1)


def _seconds(span: Span, times: StageTimes, *, split: bool) -> float:
    return seconds_of_step(span, _costs(times, ranks=span.shape.stages, split=split))


def simulated_step(program: schedules.Program, times: StageTimes) -> StepTime:
    """The steady state of any program, by simulating all of it.

    Raises:
        ValueError: the program has too few steps (see `schedules.simulate.steps_to_measure`).
    """
    costs = _costs(times, ranks=program.num_ranks, split=program.split_backward)
    measured = throughput(simulate(program, costs))
    return StepTime(seconds=measured.step_time, bubble=measured.bubble)


def unflushed_step(config: RunConfig, times: StageTimes) -> StepTime:
    """The steady state of a schedule of the family that is never flushed, by simulation; of many
    micro-batches, those beyond the program that is analysed take as long as they do between updates.

    Args:
        config: of the run.
        times: of its stages, shards of the head among them.

    Raises:
        schedules.ScheduleError: the schedule cannot be built for these numbers.
    """
    span = steady_span(Shape.of(config))
    member, microbatches = schedules.find(config.schedule.name), config.schedule.microbatches
    split = config.schedule.split or traits(member.name)[0]
    further = microbatches - span.shape.microbatches
    interval = microbatches
    if member.default_interval is not None:
        interval = config.schedule.update_interval or member.default_interval(microbatches)

    def played(times: StageTimes) -> float:
        return _seconds(span, times, split=split)

    if not further:
        seconds = played(times)
    elif interval < microbatches:
        seconds = played(times) * microbatches / span.shape.microbatches
    else:
        none = (0.0,) * len(times.update)
        each = played(replace(times, update=none, reduction=none)) / span.shape.microbatches
        # Where stages update together, they hide a reduction.
        hidden = further * each * member.updates_together
        reduction = tuple(max(0.0, seconds - hidden) for seconds in times.reduction)
        seconds = played(replace(times, reduction=reduction)) + further * each
    updates = microbatches // interval
    busy = microbatches * times.of_microbatch(split=split) + updates * sum(times.update)
    return StepTime(seconds=seconds, bubble=max(0.0, 1 - busy / config.parallel.stages / seconds))


def sharded_step(config: RunConfig, times: StageTimes) -> StepTime:
    """The steady state of a synchronous schedule whose head is in shards, by simulation; of many
    micro-batches, those beyond a few rounds in proportion.

    Args:
        config: of the run.
        times: of its stages, shards of the head among them.
    """
    schedule, ranks, tied = config.schedule, config.parallel.stages, config.model.tied
    chunks = schedule.chunks if "chunks" in schedules.options_taken(schedule.name) else 1
    split, _ = traits(schedule.name)

    def played(count: int) -> float:
        span = _two_steps(
            schedule.name, ranks=ranks, microbatches=count, chunks=chunks, shard_head=True, tied=tied
        )
        return _seconds(span, times, split=split)

    rounds = max(FLUSHED_SHARDED_ROUNDS, -(-FLUSHED_MICROBATCHES // ranks))
    last, simulated, microbatches = ROUNDS_EXTRAPOLATED * ranks, schedule.microbatches, schedule.microbatches
    if microbatches > rounds * ranks:
        # The same rest of the rounds, as ranks may differ.
        simulated = (rounds - 1) * ranks + (microbatches - (rounds - 1) * ranks) % last
    seconds = played(simulated)
    if simulated < microbatches:
        seconds += (microbatches - simulated) / last * (seconds - played(simulated - last))
    busy = (microbatches * times.of_microbatch(split=split) + sum(times.update)) / ranks
    return StepTime(seconds=seconds, bubble=max(0.0, 1 - busy / seconds))


def _costs(times: StageTimes, *, ranks: int, split: bool) -> Costs:
    # A stage sends a message forward and one back for each micro-batch.
    busy = 2 * times.message >= BUSY_LINK * fmean(times.whole(split=split))
    shared = busy and len(times.forward) > ranks and not times.head
    latency = 0.0 if shared else times.message
    return Costs(
        forward=times.forward,
        backward=times.backward,
        input_half=times.input_half,
        weight_half=times.weight_half,
        head=times.head,
        head_weight=times.head_weight,
        embed=times.embed,
        embed_weight=times.embed_weight,
        update=times.update,
        reduction=times.reduction,
        norm=0.0,
        latency=latency,
        hidden_latency=latency,
        part_latency=latency,
        transfer=times.message if shared else 0.0,
        jitter=0.0,
        seed=0,
    )
