"""Programs whose head is in shards: what they keep of the programs without, and what they gain."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.schedule_cases import arguments, run

from schedules import (
    NAMES,
    Op,
    Program,
    ScheduleError,
    analyze,
    build,
    find_problems,
    parse_action,
    smallest_delay,
    verify,
)
from schedules.catalogue import FAMILY
from schedules.costs import uniform_costs
from schedules.deadlock import find_deadlock, sends_in_flight
from schedules.step_time import step_time

SHARDED = tuple(name for name in NAMES if FAMILY[name].default_interval is None and name != "looped-bfs")
SOME = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def both(asked: dict[str, Any]) -> tuple[int, Program, Program]:
    """A delay, and the program without shards and with them at that delay."""
    asked = {**asked, "shard_head": True}
    if "delay" in FAMILY[asked["name"]].options:
        order = {key: asked[key] for key in ("ahead", "split") if key in asked}
        least = smallest_delay(
            asked["name"],
            stages=asked["stages"],
            microbatches=asked["microbatches"],
            shard_head=True,
            **order,
        )
        asked["delay"] = max(least, asked["delay"] or 1)
    return asked.get("delay", 0), build(**{**asked, "shard_head": False}), build(**asked)


@SOME
@given(arguments(names=SHARDED, max_stages=8, max_microbatches=16))
def test_blocks_keep_their_work_and_versions_with_one_more_micro_batch_in_flight(asked):
    delay, whole, sharded = both(asked)
    blocks = range(whole.num_stages)
    for stage in blocks:
        assert sorted(map(str, sharded.stage_actions(stage))) == sorted(map(str, whole.stage_actions(stage)))
    before, after = analyze(whole), analyze(sharded)
    most = 1 + delay
    for stage in blocks:
        assert after.activations[stage] <= before.activations[stage] + 1
        assert after.versions[stage] <= max(before.versions[stage], most)
        assert after.delay_max[stage] == before.delay_max[stage]
    chunks = whole.num_stages // whole.num_ranks
    for now, then in zip(after.rank_activations, before.rank_activations, strict=True):
        assert now <= then + chunks
    for shard in range(whole.num_stages, sharded.num_stages):
        assert after.delay_max[shard] == after.delay_max[0]
        assert after.versions[shard] <= most


@pytest.mark.parametrize("name", ["1f1b", "2bw", "2bw-v", "zb-v", "v-half"])
@pytest.mark.parametrize("head", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_sharded_head_costs_its_share_of_work_and_no_waiting(name, head, ranks):
    """At the even costs that blocks are ordered for, with messages that take no time: a step takes what it
    takes without a head, and the head's share."""
    microbatches = 4 * ranks
    whole = build(name, stages=ranks, microbatches=microbatches, steps=8)
    sharded = build(name, stages=ranks, microbatches=microbatches, steps=8, shard_head=True)
    without = step_time(whole, uniform_costs(whole)).seconds
    step = step_time(sharded, uniform_costs(sharded, head=head)).seconds
    share = 3 * head / ranks * microbatches
    # A flushed step has to fill and drain with a forward more, and with S of its first and last micro-batch.
    flushed = name in ("1f1b", "zb-v", "v-half")
    assert step <= without + share + flushed * (3 + 3 * 3 * head / ranks) + 1e-9
    last = step_time(whole, uniform_costs(whole, head=head)).seconds
    assert step < last


@pytest.mark.parametrize("name", ["2bw", "2bw-v"])
def test_the_delay_grows_only_where_one_more_forward_ahead_needs_it(name):
    lead = {"2bw": 3, "2bw-v": None}[name]
    for microbatches in range(4, 12):
        plain = build(name, stages=4, microbatches=microbatches, steps=12)
        sharded = build(name, stages=4, microbatches=microbatches, steps=12, shard_head=True)
        before, after = max(analyze(plain).delay_max), max(analyze(sharded).delay_max)
        assert before <= after <= before + 1
        if lead is not None:
            assert after == max(1, -(-(lead + 1) // microbatches))


@SOME
@given(
    arguments(names=SHARDED, max_stages=6, max_microbatches=12, tied=True), st.integers(1, 30), st.integers()
)
def test_shards_of_embedding_and_head_end_and_cost_stages_no_micro_batch_in_flight(asked, room, seed):
    """The shard itself may do a T after the next S, where it did it before: one more, for that long."""
    tied, alone = build(**asked), build(**{**asked, "tied": False})
    verify(tied)
    needed = sends_in_flight(tied)
    ran = run(tied, capacity=needed, chance=random.Random(seed))
    assert ran.finished
    assert ran.unread == 0
    ran = run(tied, capacity=room, chance=random.Random(seed))
    assert ran.finished == (find_deadlock(tied, channel_capacity=room) is None)
    with_embedding, without = analyze(tied), analyze(alone)
    blocks = tied.num_stages - tied.head_shards
    assert with_embedding.activations[:blocks] == without.activations[:blocks]
    assert with_embedding.rank_activations == without.rank_activations
    for shard in range(blocks, tied.num_stages):
        # Fewer micro-batches a step than a pipeline is long: T of the step after the next wait for an update.
        short = not FAMILY[asked["name"]].synchronous and asked["microbatches"] <= asked["stages"]
        assert with_embedding.activations[shard] <= without.activations[shard] + 1 + short
    assert with_embedding.versions == without.versions
    ops = (Op.EMBED, Op.EMBED_WEIGHT)
    for stage in range(tied.num_stages):
        rest = [action for action in tied.stage_actions(stage) if action.op not in ops]
        assert sorted(rest) == sorted(alone.stage_actions(stage))


def test_what_cannot_have_shards_is_refused():
    for name in ("pipedream", "paci", "paci-v"):
        with pytest.raises(ScheduleError, match="stages update on their own, and shards of the head"):
            build(name, stages=2, microbatches=4, steps=1, shard_head=True)
    with pytest.raises(ScheduleError, match="looped-bfs: shards of the head need backwards"):
        build("looped-bfs", stages=2, microbatches=4, steps=1, shard_head=True)
    with pytest.raises(ScheduleError, match="needs a delay of at least 2, and 1 is asked for"):
        build("2bw", stages=4, microbatches=3, steps=1, delay=1, shard_head=True)


PROGRAM = build("2bw", stages=2, microbatches=2, steps=3, shard_head=True)


def changed(old: str, new: str | None, *, of: Program = PROGRAM) -> Program:
    """`of` with one action replaced, or left out."""
    actions = [
        tuple(
            replacement
            for action in rank
            for replacement in (
                [action] if str(action) != old else [] if new is None else [parse_action(new)]
            )
        )
        for rank in of.actions
    ]
    return replace(of, actions=tuple(actions))


def moved(action: str, *, before: str, of: Program) -> Program:
    """`of` with one action of a rank earlier or later."""
    actions = []
    for rank in of.actions:
        rest = [one for one in rank if str(one) != action]
        if len(rest) < len(rank):
            rest.insert([str(one) for one in rest].index(before), parse_action(action))
        actions.append(tuple(rest))
    return replace(of, actions=tuple(actions))


TIED = build("1f1b", stages=2, microbatches=2, steps=2, shard_head=True, tied=True)
UNFLUSHED = build("2bw", stages=4, microbatches=4, steps=3, shard_head=True, tied=True)


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        (changed("3E2@1", "3E2@0", of=TIED), "3E2@0 must read version 1, as stage 0 does"),
        (changed("3E2@1", None, of=TIED), "there is no look-up 3E2@1 before it"),
        (changed("3G3@1", None, of=TIED), "3U2 comes between the two parts of the gradient of"),
        (changed("3E2@1", "3E1@1", of=TIED), "stage 3 embeds micro-batch 1 twice"),
        (moved("4G4@0", before="4U1", of=UNFLUSHED), "4G4@0 adds to the gradient of update 1, which is not"),
        (moved("4U1", before="4U2", of=UNFLUSHED), "4T8@1 belongs to update 3, and the newest version"),
        (replace(TIED, tied_shards=False), "stage 2 is a shard of the head"),
        (changed("3S4@1", "3S4@0"), "3S4@0 must read version 1, as stage 1 does"),
        (changed("3T2@0", None), "stage 3 never performs the weight half of the backward of micro-batch 2"),
        (changed("2S5@1", None), "stage 2 never forwards micro-batch 5"),
        (changed("2U2", None), "2U3 writes version 3 where 2 is due"),
        (changed("1F3@0", "1S3@0"), "stage 1 is no shard of the head"),
        (changed("3S3@0", "3F3@0"), "stage 3 is a shard of the head"),
        (replace(PROGRAM, head_shards=1), "must be shards of the head on ranks 0, 1, ..., one each"),
        (replace(PROGRAM, head_shards=4), "all of the 4 stages are shards of the head"),
        (replace(PROGRAM, updates_together=False), "shards of the head must update together"),
    ],
)
def test_the_verifier_knows_shards(program, problem):
    assert any(problem in found for found in find_problems(program)), find_problems(program)


def test_a_backward_before_the_shards_is_a_deadlock():
    [first, last] = PROGRAM.actions
    place = next(at for at, action in enumerate(last) if action.stage == 1 and action.op is Op.BACKWARD)
    head = next(at for at, action in enumerate(last) if action.op is Op.HEAD)
    swapped = list(last)
    swapped.insert(head, swapped.pop(place))
    [problem] = find_problems(replace(PROGRAM, actions=(first, tuple(swapped))))
    assert problem.startswith("deadlock: ")
    assert "waits at 1B0@0 for stage 3's part of the head's gradient of micro-batch 0" in problem


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("name", ["2bw", "2bw-v"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_the_order_is_the_same_in_every_step(name: str, ranks: int, ahead: int, tied: bool) -> None:
    """Rounding of times once changed it after some fifty micro-batches, and with it what messages cost."""
    m, steps, filling = 8 * ranks, 8, 2
    program = build(name, stages=ranks, microbatches=m, steps=steps, ahead=ahead, shard_head=True, tied=tied)
    for actions in program.actions:
        order = [action for action in actions if action.op is not Op.UPDATE]
        of_a_step = len(order) // steps
        later = [(stage, op, microbatch - m) for stage, op, microbatch, _ in order[of_a_step:]]
        first, last = filling * of_a_step, (steps - 2) * of_a_step
        assert later[first:last] == [action[:3] for action in order[first:last]]
