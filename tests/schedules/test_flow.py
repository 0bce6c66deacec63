"""Flows end when the simulator says, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from schedules import FAMILY, Program, build
from schedules.costs import Costs
from schedules.flow import flow_between, seconds_between_ends
from schedules.simulate import seconds_between, simulate

STEPS = 3


def drawn_program(name: str, chance: random.Random) -> Program:
    """Of a schedule, with any of its options."""
    schedule, stages = FAMILY[name], chance.randint(2, 4)
    asked: Mapping[str, Any] = {
        "chunks": 2,
        "ahead": chance.randint(1, 2),
        "split": chance.choice([False, True]),
    }
    shard_head = schedule.can_shard_head and chance.choice([False, True])
    return build(
        name,
        stages=stages,
        microbatches=stages * chance.randint(2, 4),
        steps=STEPS,
        shard_head=shard_head,
        tied=shard_head and chance.choice([False, True]),
        **{option: value for option, value in asked.items() if option in schedule.options},
    )


def drawn_costs(program: Program, chance: random.Random) -> Costs:
    """Any times; half of the stages have no reduction, so that their updates may come at once."""

    def each() -> tuple[float, ...]:
        return tuple(chance.choice([0.0, 1.0, chance.uniform(0, 2)]) for _ in range(program.num_stages))

    of_shards = [each() if program.head_shards else () for _ in range(4)]
    return Costs(
        forward=each(),
        backward=each(),
        input_half=each(),
        weight_half=each(),
        head=of_shards[0],
        head_weight=of_shards[1],
        embed=of_shards[2],
        embed_weight=of_shards[3],
        update=each(),
        reduction=tuple(chance.choice([0.0, chance.uniform(0, 9)]) for _ in range(program.num_stages)),
        norm=0.0,
        latency=chance.uniform(0, 1),
        hidden_latency=chance.uniform(0, 1),
        part_latency=chance.uniform(0, 1),
        transfer=0.0,
        jitter=0.0,
        seed=0,
    )


@pytest.mark.parametrize("name", FAMILY)
def test_steps_end_when_the_simulator_says(name: str, chance: random.Random) -> None:
    for _ in range(20):
        program = drawn_program(name, chance)
        costs, (first, last) = drawn_costs(program, chance), chance.choice([(0, 1), (1, 2), (0, 2)])
        flow = flow_between(program, first, last, reduced=[time > 0 for time in costs.reduction])
        assert seconds_between_ends(flow, costs) == seconds_between(simulate(program, costs), first, last)


def test_a_flow_serves_all_costs_with_the_same_reductions(chance: random.Random) -> None:
    program = build("2bw", stages=4, microbatches=8, steps=STEPS, shard_head=True)
    flow = flow_between(program, 1, 2, reduced=[True] * program.num_stages)
    found = set()
    for _ in range(5):
        costs = drawn_costs(program, chance)
        found.add(seconds_between_ends(flow, costs))
        assert seconds_between_ends(flow, costs) == seconds_between(simulate(program, costs), 1, 2)
    assert len(found) == 5


@pytest.mark.parametrize("name", ["1f1b", "2bw", "paci"])
def test_a_flow_has_what_it_takes_until_its_end_and_no_more(name: str) -> None:
    program = build(name, stages=3, microbatches=6, steps=STEPS)
    flows = [flow_between(program, 0, last, reduced=[True] * 3) for last in (1, 2)]
    assert flows[0].steps == flows[1].steps[: len(flows[0].steps)]
    assert len(flows[0].steps) < len(flows[1].steps) <= sum(map(len, program.actions))
    assert max(flows[0].to_ends) == len(flows[0].steps)
