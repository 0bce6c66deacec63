"""The simulator against a slow solution of the same rules, and against cases small enough for paper."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.schedule_cases import TIMES, costs_of, programs

from schedules import Action, Op, Program, ScheduleError, build
from schedules.costs import Costs, uniform_costs
from schedules.links import Links, Transfer
from schedules.messages import Channel, Kind
from schedules.simulate import simulate
from schedules.step_time import step_time

SOME = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def messages(program: Program, costs: Costs, action: Action) -> list[tuple[str, int, float]]:
    """What `action` sends, to which stage, with which latency."""
    last = program.num_stages - 1 - program.head_shards
    shards = range(last + 1, program.num_stages)
    op, stage = action.op, action.stage
    if op is Op.HEAD:
        return [("part", last, costs.part_latency)]
    if op is Op.EMBED:
        return [("embedded", 0, costs.latency)]
    if op is Op.FORWARD and stage == last:
        return [("activations", shard, costs.hidden_latency) for shard in shards]
    if op is Op.FORWARD:
        return [("activations", stage + 1, costs.latency)]
    if op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        before = [stage - 1] if stage else shards if program.tied_shards else []
        sums = shards if stage == last else []
        return [("gradient", other, costs.latency) for other in before] + [
            ("sums", shard, costs.latency) for shard in sums
        ]
    return []


def awaited(program: Program, action: Action) -> list[tuple[str, int]]:
    """What `action` waits for, from which stage."""
    last = program.num_stages - 1 - program.head_shards
    shards = range(last + 1, program.num_stages)
    op, stage = action.op, action.stage
    if op is Op.FORWARD and stage == 0:
        return [("embedded", shard) for shard in shards if program.tied_shards]
    if op is Op.FORWARD:
        return [("activations", stage - 1)]
    if op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        return [("part", shard) for shard in shards] if stage == last else [("gradient", stage + 1)]
    source = {
        Op.HEAD: ("activations", last),
        Op.HEAD_WEIGHT: ("sums", last),
        Op.EMBED_WEIGHT: ("gradient", 0),
    }
    return [source[op]] if op in source else []


Sent = tuple[str, int, int, int]
"""What, from which stage, to which, of which micro-batch."""


def slow_arrivals(program: Program, sent: dict[Sent, float], transfer: float) -> dict[Sent, Fraction]:
    """When messages between ranks arrive, going from each change of who sends to the next one.

    Args:
        program: says which rank has which stage.
        sent: when the messages are sent; those of a channel in order.
        transfer: time that a message takes if it has the links for itself.
    """
    rank_of = program.rank_of_stage
    left = dict.fromkeys(sent, Fraction(transfer))
    arrived: dict[Sent, Fraction] = {}
    now = Fraction(0)
    while left:
        going: dict[tuple[str, int, int], Sent] = {}
        for message in left:
            if sent[message] <= now:
                going.setdefault(message[:3], message)
        pace = {
            message: max(
                sum(rank_of[other[1]] == rank_of[message[1]] for other in going.values()),
                sum(rank_of[other[2]] == rank_of[message[2]] for other in going.values()),
            )
            for message in going.values()
        }
        changes = [Fraction(sent[message]) for message in left if sent[message] > now]
        changes += [now + left[message] * times for message, times in pace.items()]
        until = min(changes)
        for message, times in pace.items():
            left[message] -= (until - now) / times
            if left[message] == 0:
                arrived[message] = until
                del left[message]
        now = until
    return arrived


def slow_ends(program: Program, costs: Costs, given: dict[str, float]) -> dict[str, float]:
    """When each action ends if what it waits for is sent as `given`. What ends as it is given to end is the
    solution: no action waits for what depends on itself."""
    sent: dict[Sent, float] = {}
    latency: dict[Sent, float] = {}
    arrival: dict[Sent, Fraction] = {}
    for action in program.all_actions():
        for what, destination, late in messages(program, costs, action):
            message = (what, action.stage, destination, action.microbatch)
            end = given[str(action)]
            if program.rank_of_stage[action.stage] == program.rank_of_stage[destination]:
                arrival[message] = Fraction(end)
            elif what == "sums":
                arrival[message] = Fraction(end + late)
            else:
                sent[message], latency[message] = end, late
    for message, time in slow_arrivals(program, sent, costs.transfer).items():
        arrival[message] = time + Fraction(latency[message])
    times = {
        Op.FORWARD: costs.forward,
        Op.BACKWARD: costs.backward,
        Op.BACKWARD_INPUT: costs.input_half,
        Op.BACKWARD_WEIGHT: costs.weight_half,
        Op.HEAD: costs.head,
        Op.HEAD_WEIGHT: costs.head_weight,
        Op.UPDATE: costs.update,
        Op.EMBED: costs.embed,
        Op.EMBED_WEIGHT: costs.embed_weight,
    }
    ends = {}
    for actions in program.actions:
        free = 0.0
        for action in actions:
            come = [
                float(arrival[what, source, action.stage, action.microbatch])
                for what, source in awaited(program, action)
            ]
            free = max([free, *come]) + times[action.op][action.stage]
            ends[str(action)] = free
    return ends


@SOME
@given(programs(max_stages=5, max_microbatches=6, max_steps=3), st.data())
@pytest.mark.slow
def test_every_action_ends_when_the_slow_solution_says(program, data):
    given_costs = {"reduction": (0.0,) * program.num_stages, "norm": None, "next_latency": ()}
    costs = data.draw(costs_of(program, transfer=data.draw(TIMES), **given_costs))
    timeline = simulate(program, costs)
    ends = {
        str(action): end
        for actions, of_rank in zip(program.actions, timeline.ends, strict=True)
        for action, end in zip(actions, of_rank, strict=True)
    }
    assert ends == pytest.approx(slow_ends(program, costs, ends), abs=1e-9)


@SOME
@given(programs(max_stages=5, max_microbatches=6, max_steps=3), st.integers(0, 9))
def test_a_rank_does_one_thing_at_a_time_whatever_the_collectives(program, seed):
    costs = uniform_costs(program, update=0.5, reduction=1.5, norm=0.25, latency=0.125)
    costs = replace(costs, jitter=0.3, seed=seed)
    timeline = simulate(program, costs)
    for starts, ends in zip(timeline.starts, timeline.ends, strict=True):
        spans = sorted(zip(starts, ends, strict=True))
        assert all(start >= 0 and end >= start for start, end in spans)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def place_of(program: Program, text: str) -> tuple[int, int]:
    for rank, actions in enumerate(program.actions):
        for place, action in enumerate(actions):
            if str(action) == text:
                return rank, place
    raise AssertionError(f"{text} is not in the program")


def test_one_stage_waits_for_its_reduction_before_the_next_step():
    program = build("1f1b", stages=1, microbatches=1, steps=2)
    timeline = simulate(program, uniform_costs(program, update=0.5, reduction=4.0))
    # F 0-1, B 1-3, reduction 3-7, U 7-7.5, F 7.5-8.5, B 8.5-10.5, reduction to 14.5, U to 15.
    assert list(timeline.ends[0]) == [1.0, 3.0, 7.5, 8.5, 10.5, 15.0]


def test_2bw_hides_the_reduction_behind_a_step_of_other_work():
    program = build("2bw", stages=2, microbatches=4, steps=8)
    hidden = step_time(program, uniform_costs(program, reduction=9.0))
    # The first stage has m - p + 1 = 3 micro-batches of 3 between an update and its first reader.
    assert (hidden.bubble, hidden.seconds) == (0.0, 12.0)
    assert step_time(program, uniform_costs(program, reduction=12.0)).bubble > 0


def test_an_update_by_the_global_norm_waits_for_the_slowest_stage():
    program = build("1f1b", stages=2, microbatches=1, steps=2)
    timeline = simulate(program, uniform_costs(program, norm=0.5, update=0.25))
    # F 0-1 and 1-2, B 2-4 on the last stage and 4-6 on the first: the norm is there at 6.5.
    for text in ("0U1", "1U1"):
        rank, place = place_of(program, text)
        assert (timeline.starts[rank][place], timeline.ends[rank][place]) == (6.5, 6.75)


def test_messages_that_a_rank_sends_or_receives_at_once_share_its_link():
    def transfer(sender, receiver):
        channel = Channel(sender, receiver, Kind.ACTIVATIONS)
        return Transfer(
            channel=channel, sender=sender, receiver=receiver, content=(sender, receiver), left=3.0
        )

    for ends in ((0, 1), (0, 2)), ((1, 0), (2, 0)):
        links = Links()
        for at, (sender, receiver) in enumerate(ends):
            links.send(transfer(sender, receiver), at=float(at))
        # The first is alone until 1 and shares until 5; then the second has 1 left.
        assert [links.next_arrival() for _ in range(3)] == [(5.0, ends[0]), (6.0, ends[1]), None]


def test_jitter_is_seeded_and_the_same_for_every_schedule():
    def of(name, seed):
        program = build(name, stages=3, microbatches=4, steps=2)
        timeline = simulate(program, replace(uniform_costs(program), jitter=0.2, seed=seed))
        return {
            (action.op, action.stage, action.microbatch): end - start
            for actions, starts, ends in zip(program.actions, timeline.starts, timeline.ends, strict=True)
            for action, start, end in zip(actions, starts, ends, strict=True)
        }

    assert of("2bw", 1) == of("2bw", 1) != of("2bw", 2)
    assert of("2bw", 1) == pytest.approx(of("gpipe", 1))


def test_jitter_has_the_spread_that_was_asked_for():
    program = build("gpipe", stages=1, microbatches=4000, steps=1)
    timeline = simulate(program, replace(uniform_costs(program, forward=2.0), jitter=0.25))
    times = [end - start for start, end in zip(timeline.starts[0], timeline.ends[0], strict=True)][:4000]
    mean = sum(times) / 4000
    spread = (sum((time - mean) ** 2 for time in times) / 3999) ** 0.5
    # Five standard errors of the mean and of the spread of 4000 draws.
    assert mean == pytest.approx(2.0, abs=5 * 0.5 / 4000**0.5)
    assert spread == pytest.approx(0.5, abs=5 * 0.5 / 4000**0.5)


def test_the_slowest_stage_sets_the_pace_of_an_unflushed_pipeline():
    program = build("2bw", stages=3, microbatches=4, steps=8)
    costs = replace(uniform_costs(program), forward=(1.0, 2.0, 1.0))
    measured = step_time(program, costs)
    assert measured.seconds == 16.0
    assert measured.busy == (0.75, 1.0, 0.75)
    assert measured.bubble == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": -1.0}, "forward takes -1.0"),
        ({"latency": float("nan")}, "latency takes nan"),
        ({"input_half": 1.0}, "are given together"),
    ],
)
def test_impossible_times_are_refused(costs, message):
    with pytest.raises(ScheduleError, match=message):
        uniform_costs(build("gpipe", stages=1, microbatches=1, steps=1), **costs)
