"""Ranks whose updates wait for each other: none stands still, however late the other data ranks are."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from support.schedule_cases import programs

from schedules import FAMILY, Op, build
from schedules.actions import ADDING_NOTHING
from schedules.dependencies import after_own_update
from schedules.messages import received, sent
from stages.update.async_update import needs_update
from stages.weights.gradient_buffers import gradient_buffers

TOGETHER = tuple(name for name, each in FAMILY.items() if each.updates_together)


def stuck_ranks(program, *, giving_early):
    """Ranks that do not reach the end where each gives its part of an update as late as it may: before an
    action that needs the update, at the end, and with `giving_early` before those of `after_own_update`.
    """
    ranks = range(program.num_ranks)
    stages = [{action.stage for action in actions} for actions in program.actions]
    buffers = gradient_buffers([program], data_ranks=2, on_gpu=False)
    early = [after_own_update(program, rank) if giving_early else () for rank in ranks]
    position, pending, written = [0] * len(ranks), [None] * len(ranks), [set() for _ in ranks]
    given_by, there = [program.first_step] * len(ranks), Counter()
    moving = True
    while moving:
        moving = False
        for rank in ranks:
            while position[rank] < len(program.actions[rank]):
                action = program.actions[rank][position[rank]]
                version = pending[rank]
                if version is not None:
                    needed = needs_update(action, stages=stages[rank], version=version)
                    # The next gradient would be added into the one that the update reads.
                    needed |= action.op not in ADDING_NOTHING and buffers[action.stage] == 1
                    if (needed or action in early[rank]) and given_by[rank] < version:
                        given_by[rank], moving = version, True
                    if needed and min(given_by) < version:
                        break
                    if needed:
                        pending[rank] = None
                messages = received(action, program)
                if not all(there[message] for message in messages):
                    break
                there.subtract(messages)
                there.update(sent(action, program))
                if action.op is Op.UPDATE:
                    written[rank].add(action.stage)
                    if written[rank] == stages[rank]:
                        pending[rank], written[rank] = action.version, set()
                position[rank] += 1
                moving = True
            if position[rank] == len(program.actions[rank]) and pending[rank] is not None:
                given_by[rank], pending[rank], moving = pending[rank], None, True
    return [rank for rank in ranks if position[rank] < len(program.actions[rank])]


@settings(max_examples=60)
@given(programs(names=TOGETHER, max_stages=6, max_microbatches=12))
def test_no_rank_waits_for_ever_for_what_depends_on_its_own_update(program):
    assert not stuck_ranks(program, giving_early=True)


@pytest.mark.parametrize(
    "of",
    [
        {"name": "2bw-v", "microbatches": 2, "delay": 2},
        {"name": "2bw", "microbatches": 5, "ahead": 2, "shard_head": True},
    ],
)
def test_ranks_would_wait_if_they_gave_their_part_only_where_they_need_the_update(of):
    program = build(stages=2 if of["name"] == "2bw-v" else 3, steps=5, **of)
    assert stuck_ranks(program, giving_early=False)
