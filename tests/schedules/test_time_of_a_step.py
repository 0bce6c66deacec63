"""The time of a step, against the simulator over many steps and against cases small enough for paper."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.schedule_cases import TIMES, arguments, costs_of

from schedules import Program, build, find
from schedules.actions import NO_MICROBATCH, Action, Op
from schedules.costs import Costs, uniform_costs
from schedules.simulate import simulate
from schedules.step_time import NotPeriodicError, step_graph, step_graph_of, step_time

SOME = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MOST_STEPS = 4096


@st.composite
def any_costs(draw, program: Program) -> Costs:
    """Costs with anything that a graph has."""
    norm = draw(st.sampled_from([None, 0.0, 2.0]))
    if draw(st.booleans()):
        return uniform_costs(program, norm=norm, reduction=draw(TIMES), update=draw(TIMES))
    return draw(costs_of(program, norm=norm, transfer=0.0))


def settled(program: Program, costs: Costs, seconds: float) -> bool:
    """Whether the simulated steps of `program` repeat before its drain, with `seconds` for each."""
    timeline = simulate(program, costs)
    ends = [
        [of_rank[place] for place in marks[: 3 * program.steps // 4]]
        for of_rank, marks in zip(timeline.ends, program.ends_of_steps, strict=True)
    ]
    return any(
        all(of_rank[-1] - of_rank[-1 - period] == pytest.approx(period * seconds) for of_rank in ends)
        for period in range(1, 7)
    )


def check_against_the_simulator(asked, data) -> None:
    def program_of(steps: int) -> Program:
        return build(**(asked | {"steps": steps}))

    costs = data.draw(any_costs(program_of(1)))
    reduced = [time > 0 for time in costs.reduction]
    graph, program = step_graph_of(program_of, reduced=reduced, norm=costs.norm is not None)
    if find(asked["name"]).synchronous and graph.norm:
        assert step_graph(program_of(2), reduced=reduced, is_flushed=True) == graph
    found = graph.step_time(costs)
    steps = 4 * program.steps
    while not settled(program_of(steps), costs, found.seconds):
        steps *= 2
        assert steps <= MOST_STEPS, f"steps do not come to take {found.seconds}"
    again = graph.step_time(costs, policy=found.policy)
    assert again.seconds == pytest.approx(found.seconds)


@SOME
@given(arguments(max_stages=4, max_microbatches=6), st.data())
def test_steps_come_to_take_as_long_in_the_simulator(asked, data):
    check_against_the_simulator(asked, data)


@settings(SOME, max_examples=100)
@given(arguments(), st.data())
@pytest.mark.slow
def test_steps_of_large_pipelines_come_to_take_as_long_in_the_simulator(asked, data):
    check_against_the_simulator(asked, data)


@pytest.mark.parametrize(
    ("stages", "microbatches", "seconds"),
    [(4, 1, 4.5), (8, 1, 8.5), (16, 4, 21.0), (32, 8, 43.0), (4, 8, 24.0)],
)
def test_few_microbatches_in_a_deep_2bw_wait_for_the_norm(stages, microbatches, seconds):
    graph, program = step_graph_of(
        lambda steps: build("2bw", stages=stages, microbatches=microbatches, steps=steps)
    )
    found = graph.step_time(uniform_costs(program))
    assert found.seconds == seconds
    assert found.bubble == pytest.approx(1 - 3 * microbatches / seconds)


def test_one_graph_serves_all_costs_from_any_policy(chance):
    graph, program = step_graph_of(
        lambda steps: build("2bw", stages=6, microbatches=8, steps=steps, shard_head=True), reduced=True
    )
    found, policy = [], None
    for _ in range(10):
        costs = replace(
            uniform_costs(program, head=chance.random(), reduction=9 * chance.random()),
            forward=tuple(1 + chance.random() for _ in range(program.num_stages)),
        )
        found.append(graph.step_time(costs, policy=policy))
        policy = found[-1].policy
        assert found[-1].seconds == pytest.approx(step_time(program, costs).seconds)
    assert len({each.seconds for each in found}) == 10


def test_a_norm_is_none_of_stages_that_update_on_their_own():
    program = build("paci-v", stages=4, microbatches=13, update_interval=13, steps=8)
    found = [
        step_time(program, uniform_costs(program, norm=norm, reduction=0.5)).seconds for norm in (0.0, 1.1)
    ]
    assert found == [39.75, 39.75]


def test_links_between_stages_may_differ():
    program = build("1f1b", stages=3, microbatches=1, steps=4)
    costs = replace(uniform_costs(program, latency=100.0), next_latency=(0.25, 2.0, 0.0))
    assert step_time(program, costs).seconds == 9 + 2 * (0.25 + 2.0)


def test_steps_may_repeat_in_pairs():
    program = build("gpipe", stages=1, microbatches=2, steps=8)
    forward, backward = Op.FORWARD, Op.BACKWARD

    def step(index: int) -> list[Action]:
        first = 2 * index
        order = [(forward, first), (forward, first + 1), (backward, first), (backward, first + 1)]
        if index % 2:
            order = [order[0], order[2], order[1], order[3]]
        actions = [Action(0, op, microbatch, index) for op, microbatch in order]
        return [*actions, Action(0, Op.UPDATE, NO_MICROBATCH, index + 1)]

    program = replace(program, actions=(tuple(action for index in range(8) for action in step(index)),))
    graph = step_graph(program)
    assert graph.steps == 2
    assert graph.step_time(uniform_costs(program)).seconds == 6


@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_a_segment_without_a_middle_has_no_time_of_a_step(steps):
    program = build("2bw", stages=16, microbatches=1, steps=steps)
    with pytest.raises(NotPeriodicError, match=f"2bw: the middle of its {steps} steps? does not repeat"):
        step_graph(program)


def test_what_no_graph_has_is_refused():
    program = build("2bw", stages=2, microbatches=4, steps=6)
    graph = step_graph(program)
    for costs, message in (
        (replace(uniform_costs(program), transfer=1.0), "have to be simulated"),
        (replace(uniform_costs(program), jitter=0.1), "have to be simulated"),
        (uniform_costs(program, norm=None), "the costs have none"),
    ):
        with pytest.raises(ValueError, match=message):
            graph.step_time(costs)
    with pytest.raises(ValueError, match="no reduction at a stage"):
        step_graph(program, norm=False).step_time(uniform_costs(program, reduction=1.0, norm=None))
