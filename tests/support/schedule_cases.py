"""Hypothesis strategies for programs, and a slow and simple executor."""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from schedules import FAMILY, NAMES, Action, Op, Program, build, smallest_delay
from schedules.costs import Costs
from schedules.library.two_bw_v import block_of, least_microbatches

MOST_FORWARDS = 4096
"""Limit of forward actions per example: large programs get few steps."""

TIMES = st.integers(0, 5).map(float)
"""Whole numbers, with which cycles are equal or differ well, so that a simulation settles soon."""

OF_STAGES = ("forward", "backward", "input_half", "weight_half", "update", "reduction")
OF_SHARDS = ("head", "head_weight", "embed", "embed_weight")


@st.composite
def arguments(draw, names=NAMES, max_stages=16, max_microbatches=64, max_steps=4, tied=False):
    """Valid arguments of `build`."""
    name = draw(st.sampled_from(names))
    schedule = FAMILY[name]
    stages = draw(st.integers(1, max_stages))
    microbatches = draw(st.integers(1, max_microbatches))
    chunks = 1
    if "chunks" in schedule.options:
        chunks = draw(st.integers(1, 4))
        rounds = max(1, microbatches // stages)
        microbatches -= microbatches % rounds
    if name == "dualpipe-v":
        microbatches = max(microbatches, 2 * stages)
    order = {}
    if "ahead" in schedule.options:
        order["ahead"] = draw(st.integers(1, 2))
    if "split" in schedule.options:
        order["split"] = draw(st.booleans())
        microbatches = max(microbatches, least_microbatches(block_of(ranks=stages, **order)))
    forwards = stages * chunks * schedule.stages_per_rank * microbatches
    asked = {
        "name": name,
        "stages": stages,
        "microbatches": microbatches,
        "chunks": chunks,
        "steps": draw(st.integers(1, max(1, min(max_steps, MOST_FORWARDS // forwards)))),
        "first_step": draw(st.integers(0, 5)),
    }
    if tied:
        order["shard_head"] = True
        asked |= {"shard_head": True, "tied": True}
    elif schedule.default_interval is None and name != "looped-bfs":
        order["shard_head"] = asked["shard_head"] = draw(st.booleans())
        asked["tied"] = asked["shard_head"] and draw(st.booleans())
    if "delay" in schedule.options:
        asked |= order
        smallest = smallest_delay(name, stages=stages, microbatches=microbatches, **order)
        asked["delay"] = draw(st.one_of(st.none(), st.integers(smallest, smallest + 3)))
    if schedule.default_interval is not None:
        divisors = [a for a in range(1, microbatches + 1) if microbatches % a == 0]
        asked["update_interval"] = draw(st.one_of(st.none(), st.sampled_from(divisors)))
    return asked


def programs(**limits):
    """Programs of the built-in schedules."""
    return arguments(**limits).map(lambda asked: build(**asked))


@st.composite
def costs_of(draw, program: Program, **given: Any) -> Costs:
    """Costs of every kind, but for those given."""

    def each() -> tuple[float, ...]:
        return tuple(draw(TIMES) for _ in range(program.num_stages))

    drawn: dict[str, Any] = {name: each() for name in OF_STAGES}
    drawn |= {name: each() if program.head_shards else () for name in OF_SHARDS}
    drawn |= {name: draw(TIMES) for name in ("latency", "hidden_latency", "part_latency")}
    drawn["next_latency"] = each() if draw(st.booleans()) else ()
    return Costs(**drawn | {"jitter": 0.0, "seed": 0} | given)


@dataclass
class Ran:
    """Result of running a program: actions by stage, in the order performed."""

    performed: dict[int, list[Action]] = field(default_factory=lambda: defaultdict(list))
    unread: int = 0
    finished: bool = False


def run(program: Program, *, capacity: int | None, chance: random.Random) -> Ran:
    """Run `program`: ranks chosen at random take their next step.

    Performing an action and sending its message are two steps; the second waits while `capacity` messages of
    its kind between the same two ranks are unread. Where all stages update together, a version is there once
    every stage has performed its update to it; where each updates on its own, a forward waits until every
    stage has ended the step whose end tells all ranks whether to go on.
    Receiving checks that the message is the expected one.
    """
    last = program.num_stages - 1
    shards = range(program.num_stages - program.head_shards, program.num_stages)
    last -= len(shards)
    tied = shards if program.tied_shards else range(0)
    channels: dict[tuple[int, int, str], deque[int]] = defaultdict(deque)
    place = [0] * program.num_ranks
    outbox: list[deque[tuple[tuple[int, int, str], int]]] = [deque() for _ in range(program.num_ranks)]
    written = [program.initial_versions[-1]] * program.num_stages
    # Stage 0 ends a step last: less than 2 p micro-batches after the last stage.
    steps_behind = math.ceil((2 * program.num_ranks - 1) / program.microbatches)
    ran = Ran()

    def needed_of_all(action: Action) -> int:
        if program.updates_together:
            return action.version - 1 if action.op is Op.UPDATE else action.version
        if action.op is not Op.FORWARD:
            return 0
        known = action.microbatch // program.microbatches - steps_behind
        return known * program.microbatches // program.update_interval

    def link_of(channel: tuple[int, int, str]) -> tuple[int, int, str]:
        source, destination, kind = channel
        return program.rank_of_stage[source], program.rank_of_stage[destination], kind

    def step(rank: int) -> bool:
        if outbox[rank]:
            channel, microbatch = outbox[rank][0]
            sender, receiver, _ = link = link_of(channel)
            unread = sum(len(queue) for other, queue in channels.items() if link_of(other) == link)
            if sender != receiver and capacity is not None and unread >= capacity:
                return False
            channels[channel].append(microbatch)
            outbox[rank].popleft()
            return True
        if place[rank] == len(program.actions[rank]):
            return False
        action = program.actions[rank][place[rank]]
        stage = action.stage
        taken: list[tuple[int, int, str]] = []
        given: list[tuple[int, int, str]] = []
        if action.op is Op.FORWARD:
            taken += [(stage - 1, stage, "activations")] * (stage > 0)
            taken += [(shard, stage, "embedded") for shard in tied if stage == 0]
            given += (
                [(stage, stage + 1, "activations")]
                if stage < last
                else [(stage, shard, "hidden") for shard in shards]
            )
        elif action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            taken += (
                [(stage + 1, stage, "gradient")]
                if stage < last
                else [(shard, stage, "part") for shard in shards]
            )
            given += [(stage, stage - 1, "gradient")] * (stage > 0)
            given += [(stage, shard, "of embedded") for shard in tied if stage == 0]
            given += [(stage, shard, "sums") for shard in shards if stage == last]
        elif action.op is Op.HEAD:
            taken, given = [(last, stage, "hidden")], [(stage, last, "part")]
        elif action.op is Op.HEAD_WEIGHT:
            taken = [(last, stage, "sums")]
        elif action.op is Op.EMBED:
            given = [(stage, 0, "embedded")]
        elif action.op is Op.EMBED_WEIGHT:
            taken = [(0, stage, "of embedded")]
        if needed_of_all(action) > min(written) or not all(channels[channel] for channel in taken):
            return False
        for channel in taken:
            assert channels[channel].popleft() == action.microbatch, f"{action} takes another's message"
        outbox[rank].extend((channel, action.microbatch) for channel in given)
        place[rank] += 1
        if action.op is Op.UPDATE:
            written[stage] = action.version
        ran.performed[stage].append(action)
        return True

    waiting: set[int] = set()
    while len(waiting) < program.num_ranks:
        rank = chance.randrange(program.num_ranks)
        if step(rank):
            waiting.clear()
        else:
            waiting.add(rank)
    ran.unread = sum(len(channel) for channel in channels.values())
    ran.finished = all(at == len(actions) for at, actions in zip(place, program.actions, strict=True))
    return ran
