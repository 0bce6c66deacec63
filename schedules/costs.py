"""The simulator's cost model: times of actions and messages, in any one unit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from schedules.actions import Op, Program, ScheduleError
from schedules.messages import Channel, Kind

MOST_TIME = 1e100
"""Longest time of an action or message: a sum of as many as a program has is finite."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times of a program's actions and messages. Tuples are indexed by stage."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    """A whole backward."""
    input_half: tuple[float, ...]
    weight_half: tuple[float, ...]
    head: tuple[float, ...]
    """S of a shard of the head: its logits, and the gradient of their input; empty without shards."""
    head_weight: tuple[float, ...]
    """T of a shard: the gradient of its weights."""
    update: tuple[float, ...]
    """The optimizer step, which occupies the rank."""
    reduction: tuple[float, ...]
    """The gradient all-reduce over data-parallel ranks, while the rank does other work."""
    norm: float | None
    """Time of the gradient norm's all-reduce. Where stages update together (`Program.updates_together`), none
    updates before all have their gradient and the norm is known; None: nobody waits, as if updates that turn
    out wrong were taken back."""
    latency: float
    """From the end of a message's sending to its arrival."""
    hidden_latency: float
    """`latency` of the hidden states to a shard of the head; all shards get them from one rank."""
    part_latency: float
    """`latency` of a shard's part of the head's gradient; one rank gets them all."""
    transfer: float
    """Time that a message takes if no other shares its links: its size over the bandwidth. Softmax sums take
    none."""
    jitter: float
    """Standard deviation of the log-normal factor (mean 1) that each computation's time has."""
    embed: tuple[float, ...] = ()
    """E of a shard of a tied head: its look-up; empty: no time."""
    embed_weight: tuple[float, ...] = ()
    """G of a shard of a tied head: the gradient of its look-up; empty: no time."""
    seed: int
    """Seeds the jitter. Stage, op and micro-batch decide a factor, so that schedules meet the same ones."""
    next_latency: tuple[float, ...] = ()
    """For each stage, `latency` between it and the stage after it, both ways, where links differ (some ranks
    share a node); empty: `latency`."""

    def latency_of(self, channel: Channel) -> float:
        """From the end of the sending of a message between ranks to its arrival."""
        if channel.kind is Kind.HIDDEN:
            return self.hidden_latency
        if channel.kind is Kind.PART:
            return self.part_latency
        if self.next_latency and channel.kind in (Kind.ACTIVATIONS, Kind.GRADIENT):
            return self.next_latency[min(channel.source, channel.destination)]
        return self.latency


TIMES = {
    "forward": Op.FORWARD,
    "backward": Op.BACKWARD,
    "input_half": Op.BACKWARD_INPUT,
    "weight_half": Op.BACKWARD_WEIGHT,
    "head": Op.HEAD,
    "head_weight": Op.HEAD_WEIGHT,
    "embed": Op.EMBED,
    "embed_weight": Op.EMBED_WEIGHT,
    "update": Op.UPDATE,
}
"""Fields of `Costs`, and the ops that they are the times of."""


def uniform_costs(
    program: Program,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    input_half: float | None = None,
    weight_half: float | None = None,
    head: float = 0.0,
    update: float = 0.0,
    reduction: float = 0.0,
    norm: float | None = 0.0,
    latency: float = 0.0,
) -> Costs:
    """Costs of `program` where every rank holds an equal share of the model's blocks.

    The times of computation are those of a rank's whole share, so that schedules with different numbers of
    chunks are compared on one model: a stage takes the chunk's part of them. The head is in the last
    stage, or in equal shards.

    Args:
        program: Says how many stages and ranks there are.
        forward: One micro-batch's forward through a rank's share.
        backward: Its backward; where the halves are given, their sum counts instead.
        input_half: The input half of a split backward; None: half of `backward`.
        weight_half: The weight half; None: half of `backward`.
        head: The forward of the whole head; each half of its backward takes as long.
        update: The optimizer step of a rank's share.
        reduction: Its data-parallel all-reduce.
        norm: See `Costs`.
        latency: Of a message between ranks. Nothing shares links, and no time is random.

    Raises:
        ScheduleError: A time is negative or not finite, or only one half of the backward is given.
    """
    if (input_half is None) != (weight_half is None):
        raise ScheduleError(
            "the halves of a split backward are given together: its input half and its weight half"
        )
    if input_half is None or weight_half is None:
        input_half = weight_half = backward / 2
    else:
        backward = input_half + weight_half
    for label, time in (
        ("forward", forward),
        ("backward", backward),
        ("input", input_half),
        ("weight", weight_half),
        ("head", head),
        ("update", update),
        ("reduction", reduction),
        ("norm", norm or 0.0),
        ("latency", latency),
    ):
        if not 0 <= time <= MOST_TIME:
            raise ScheduleError(f"{label} takes {time}; accepted: 0 to {MOST_TIME:g}")
    of_stages, shards = program.loss_stage + 1, program.head_shards
    share, shard = program.num_ranks / of_stages, head / max(1, shards)
    nothing = (0.0,) * shards

    def of_blocks(time: float, of_head: float = 0.0) -> tuple[float, ...]:
        whole = 0.0 if shards else of_head
        return (*(time * share,) * (of_stages - 1), time * share + whole, *nothing)

    return Costs(
        forward=of_blocks(forward, head),
        backward=of_blocks(backward, 2 * head),
        input_half=of_blocks(input_half, head),
        weight_half=of_blocks(weight_half, head),
        head=(*(0.0,) * of_stages, *(2 * shard,) * shards) if shards else (),
        head_weight=(*(0.0,) * of_stages, *(shard,) * shards) if shards else (),
        update=of_blocks(update),
        reduction=of_blocks(reduction),
        norm=norm,
        latency=latency,
        hidden_latency=latency,
        part_latency=latency,
        transfer=0.0,
        jitter=0.0,
        seed=0,
    )


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Measured times of each rank's share of the model, in seconds. Tuples are indexed by rank."""

    forward: tuple[float, ...]
    """One micro-batch's forward."""
    input_half: tuple[float, ...]
    """The input half of its backward."""
    weight_half: tuple[float, ...]
    """The weight half."""
    update: tuple[float, ...]
    """The optimizer step."""


def with_measured_ranks(costs: Costs, program: Program, measured: RankTimes) -> Costs:
    """`costs` with measured times of computation. A rank's stages share its times equally.

    Args:
        costs: Keeps the times of everything else.
        program: To simulate.
        measured: Times of every rank.

    Raises:
        ScheduleError: There are more or fewer ranks than measurements.
    """
    if len(measured.forward) != program.num_ranks:
        raise ScheduleError(
            f"{program.schedule} has {program.num_ranks} ranks, "
            f"and {len(measured.forward)} of them were measured"
        )
    blocks = program.loss_stage + 1
    share = program.num_ranks / blocks

    def of_stages(times_by_rank: tuple[float, ...]) -> tuple[float, ...]:
        shards = (0.0,) * program.head_shards
        return (*(times_by_rank[rank] * share for rank in program.rank_of_stage[:blocks]), *shards)

    input_half, weight_half = of_stages(measured.input_half), of_stages(measured.weight_half)
    return replace(
        costs,
        forward=of_stages(measured.forward),
        backward=tuple(first + second for first, second in zip(input_half, weight_half, strict=True)),
        input_half=input_half,
        weight_half=weight_half,
        update=of_stages(measured.update),
    )


def durations(program: Program, costs: Costs) -> dict[Op, list[list[float]]]:
    """For each op but the update: by stage, the time of each micro-batch of the segment, jitter included."""
    count = program.steps * program.microbatches
    times = {op: getattr(costs, field) for field, op in TIMES.items() if op is not Op.UPDATE}
    if costs.jitter == 0:
        rows = {time: [time] * count for of_stage in times.values() for time in of_stage}
        return {op: [rows[time] for time in of_stage] for op, of_stage in times.items()}
    import numpy as np

    variance = math.log1p(costs.jitter**2)
    first = program.first_step * program.microbatches
    drawn: dict[Op, list[list[float]]] = {}
    for op, of_stage in times.items():
        drawn[op] = []
        for stage in range(len(of_stage)):
            generator = np.random.default_rng([costs.seed, stage, ord(op.value), first])
            factors = generator.lognormal(-variance / 2, math.sqrt(variance), size=count)
            drawn[op].append((of_stage[stage] * factors).tolist())
    return drawn
