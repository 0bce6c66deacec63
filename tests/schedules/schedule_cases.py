"""What the tests of schedules share: which programs to look at, and a slow, obvious way of running one."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field

from hypothesis import strategies as st

from schedules import FAMILY, NAMES, Action, Op, Program, build

MOST_FORWARDS = 4096
"""Stages times micro-batches of an example, so that the largest geometries have few steps."""


@st.composite
def arguments(draw, names=NAMES, max_stages=16, max_microbatches=64, max_steps=4):
    """Arguments of `build` that it accepts."""
    name = draw(st.sampled_from(names))
    schedule = FAMILY[name]
    stages = draw(st.integers(1, max_stages))
    microbatches = draw(st.integers(1, max_microbatches))
    chunks = 1
    if schedule.takes_chunks:
        chunks = draw(st.integers(1, 4))
        rounds = max(1, microbatches // stages)
        microbatches -= microbatches % rounds
    forwards = stages * chunks * microbatches
    asked = {
        "name": name,
        "stages": stages,
        "microbatches": microbatches,
        "chunks": chunks,
        "steps": draw(st.integers(1, max(1, min(max_steps, MOST_FORWARDS // forwards)))),
        "first_step": draw(st.integers(0, 5)),
    }
    if schedule.takes_delay:
        asked["ahead"] = draw(st.integers(1, 2))
        smallest = max(1, -(-asked["ahead"] * (stages - 1) // microbatches))
        asked["delay"] = draw(st.one_of(st.none(), st.integers(smallest, smallest + 3)))
    if schedule.default_interval is not None:
        divisors = [a for a in range(1, microbatches + 1) if microbatches % a == 0]
        asked["update_interval"] = draw(st.one_of(st.none(), st.sampled_from(divisors)))
    return asked


def programs(**limits):
    """Programs of the family."""
    return arguments(**limits).map(lambda asked: build(**asked))


@dataclass
class Ran:
    """What happened when a program was run: per stage, in the order of its actions."""

    performed: dict[int, list[Action]] = field(default_factory=lambda: defaultdict(list))
    unread: int = 0
    finished: bool = False


def run(program: Program, *, capacity: int | None, chance: random.Random) -> Ran:
    """Run `program` by letting one rank after another, chosen by chance, take its next small step.

    Performing an action and putting its message into the channel are two steps; the latter waits while the
    channel is full. Taking a message checks that it is the one that is due.
    """
    last = program.num_stages - 1
    channels: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    place = [0] * program.num_ranks
    outbox: list[tuple[tuple[int, int], int] | None] = [None] * program.num_ranks
    ran = Ran()

    def step(rank: int) -> bool:
        if outbox[rank] is not None:
            channel, microbatch = outbox[rank]
            crosses = program.rank_of_stage[channel[0]] != program.rank_of_stage[channel[1]]
            if crosses and capacity is not None and len(channels[channel]) >= capacity:
                return False
            channels[channel].append(microbatch)
            outbox[rank] = None
            return True
        if place[rank] == len(program.actions[rank]):
            return False
        action = program.actions[rank][place[rank]]
        stage = action.stage
        source = target = None
        if action.op is Op.FORWARD:
            source = stage - 1 if stage > 0 else None
            target = stage + 1 if stage < last else None
        elif action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            source = stage + 1 if stage < last else None
            target = stage - 1 if stage > 0 else None
        if source is not None:
            if not channels[source, stage]:
                return False
            assert channels[source, stage].popleft() == action.microbatch, f"{action} takes another's message"
        if target is not None:
            outbox[rank] = ((stage, target), action.microbatch)
        place[rank] += 1
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
