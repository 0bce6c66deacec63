"""The papers' formulas, against what our programs and our simulator give."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schedules import FAMILY, NAMES, analyze, build, is_synchronous
from schedules.costs import uniform_costs
from schedules.simulate import simulate
from schedules.step_time import StepTime, step_graph_of

SOME = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
STAGES = st.integers(1, 16)
MICROBATCHES = st.integers(1, 64)
ASYNCHRONOUS = [name for name in NAMES if not is_synchronous(name) and FAMILY[name].stages_per_rank == 1]
"""Those in the order of 1F1B: `2bw-v` has tests of its own."""


def measure(
    name: str, *, stages: int, microbatches: int, chunks: int = 1, ahead: int = 1, **costs: float | None
) -> StepTime:
    options = {"ahead": ahead} if ahead > 1 else {"chunks": chunks}
    graph, program = step_graph_of(
        lambda steps: build(name, stages=stages, microbatches=microbatches, steps=steps, **options),
        norm=costs.get("norm", 0.0) is not None,
    )
    return graph.step_time(uniform_costs(program, **costs))


def drain_time(name: str, *, stages: int, microbatches: int, **costs: float | None) -> float:
    """Time that filling and draining add to the steps of a long segment."""
    steps = 4 + 2 * -(-stages // microbatches)
    program = build(name, stages=stages, microbatches=microbatches, steps=steps)
    step = measure(name, stages=stages, microbatches=microbatches, **costs)
    return simulate(program, uniform_costs(program, **costs)).makespan - steps * step.seconds


@SOME
@given(st.sampled_from(["gpipe", "1f1b"]), STAGES, MICROBATCHES)
@pytest.mark.slow
def test_bubble_of_flushed_schedules(name, p, m):
    measured = measure(name, stages=p, microbatches=m)
    assert measured.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
    assert measured.seconds == 3 * (m + p - 1)
    assert drain_time(name, stages=p, microbatches=m) == 0


@SOME
@given(STAGES, st.integers(1, 8), st.integers(1, 4))
@pytest.mark.slow
def test_bubble_of_interleaved_1f1b(p, rounds, v):
    m = min(rounds, 64 // p) * p
    measured = measure("interleaved-1f1b", stages=p, microbatches=m, chunks=v)
    assert measured.bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-9)


def test_interleaving_fewer_microbatches_than_ranks_cannot_reach_its_formula():
    # With m < p a rank has run out of forwards before its first backward arrives: 0.4 against 1/3 here.
    assert measure("interleaved-1f1b", stages=4, microbatches=3, chunks=2).bubble == pytest.approx(0.4)


@SOME
@given(STAGES, MICROBATCHES)
@pytest.mark.slow
def test_zero_bubble_has_a_third_of_the_bubble_time_of_1f1b(p, extra):
    m = min(p + extra, 64)
    even = {"forward": 1.0, "input_half": 1.0, "weight_half": 1.0}
    split = measure("zero-bubble", stages=p, microbatches=m, **even)
    whole = measure("1f1b", stages=p, microbatches=m, **even)
    assert split.bubble * split.seconds == pytest.approx(whole.bubble * whole.seconds / 3, abs=1e-9)


def test_zero_bubble_needs_as_many_microbatches_as_stages_for_that():
    # One micro-batch on two stages: F F I I W is 5 long for 3 of work, and no order is shorter.
    measured = measure("zero-bubble", stages=2, microbatches=1, input_half=1.0, weight_half=1.0)
    assert measured.seconds == 5


@SOME
@given(
    st.sampled_from(ASYNCHRONOUS), STAGES, MICROBATCHES, st.sampled_from([(1.0, 2.0), (1.0, 1.0), (2.0, 3.0)])
)
@pytest.mark.slow
def test_unflushed_schedules_have_no_bubble(name, p, m, times):
    forward, backward = times
    # With fewer micro-batches the last stage completes a second gradient before it has the first one's norm.
    norm = 0.0 if m >= p - 1 else None
    measured = measure(name, stages=p, microbatches=m, forward=forward, backward=backward, norm=norm)
    assert measured.bubble == 0
    assert measured.seconds == m * (forward + backward)
    drain = drain_time(name, stages=p, microbatches=m, forward=forward, backward=backward, norm=norm)
    assert drain == (p - 1) * (forward + backward)


@SOME
@given(st.sampled_from([name for name in NAMES if FAMILY[name].stages_per_rank == 1]), STAGES, MICROBATCHES)
def test_activations_in_flight(name, p, m):
    steps = 2 + ceil(p / m)
    program = build(name, stages=p, microbatches=m, steps=steps)
    expected = {
        "gpipe": [m] * p,
        "looped-bfs": [m] * p,
        "1f1b": [min(p - s, m) for s in range(p)],
        "interleaved-1f1b": [min(p - s, m) for s in range(p)],
        "zero-bubble": [min(p, m)] * p,
    }.get(name, [p - s for s in range(p)])
    assert list(analyze(program).activations) == expected


@SOME
@given(STAGES, MICROBATCHES)
@pytest.mark.slow
def test_activations_of_ranks_in_a_v(p, m):
    # Two stages per rank: 2 p activations of a stage are those of p micro-batches over the rank's share.
    assert max(analyze(build("zb-v", stages=p, microbatches=m, steps=1)).rank_activations) <= 2 * p
    dualpipe = analyze(build("dualpipe-v", stages=p, microbatches=m + 2 * p, steps=1))
    assert max(dualpipe.rank_activations) == 2 * p + 1


@SOME
@given(STAGES, st.integers(2, 4))
@pytest.mark.slow
def test_zb_v_idles_for_the_norm_alone_where_all_parts_take_equally_long(p, rounds):
    shape: dict = {"stages": p, "microbatches": rounds * p, "input_half": 1.0, "weight_half": 1.0}
    assert measure("zb-v", **shape, norm=None).bubble == pytest.approx(0)
    # A stage takes half of a rank's forward. The last update is that of rank 0's last weight half, which
    # the others wait for.
    assert measure("zb-v", **shape).seconds == pytest.approx(3 * rounds * p + (p - 1) / 2)


@SOME
@given(STAGES, st.integers(1, 4), st.integers(1, 4))
def test_activations_of_an_interleaved_rank(p, rounds, v):
    m = rounds * p
    analysis = analyze(build("interleaved-1f1b", stages=p, microbatches=m, steps=1, chunks=v))
    expected = [min(p - r, m) if v == 1 else min((v - 1) * p + 2 * (p - 1 - r) + 1, v * m) for r in range(p)]
    assert list(analysis.rank_activations) == expected


@SOME
@given(st.sampled_from([name for name in NAMES if is_synchronous(name)]), STAGES, MICROBATCHES)
@pytest.mark.slow
def test_synchronous_schedules_have_no_delay_and_one_version(name, p, m):
    m += 2 * p if name == "dualpipe-v" else 0
    analysis = analyze(build(name, stages=p, microbatches=m, steps=3))
    assert set(analysis.delay_max) == set(analysis.mismatch_max) == {0}
    assert set(analysis.versions) == {1}


@SOME
@given(STAGES, MICROBATCHES, st.integers(1, 3), st.integers(0, 3))
def test_2bw_has_the_same_delay_at_every_stage(p, m, a, extra):
    d = max(1, ceil(a * (p - 1) / m)) + extra
    analysis = analyze(build("2bw", stages=p, microbatches=m, steps=d + 3, ahead=a, delay=d))
    assert analysis.delay_max == (d,) * p
    assert analysis.mismatch_max == (0,) * p
    assert analysis.versions == (d + 1,) * p
    # From step d on, away from the start of the run, the delay is d for every gradient.
    later = analyze(build("2bw", stages=p, microbatches=m, steps=2, first_step=d, ahead=a, delay=d))
    assert later.delay_min == later.delay_max == (d,) * p


@SOME
@given(STAGES, MICROBATCHES, st.integers(1, 3))
def test_slack_of_2bw_is_m_minus_p_plus_1_at_the_first_stage_and_m_at_the_last(p, m, a):
    m = max(m, a * p)
    analysis = analyze(build("2bw", stages=p, microbatches=m, steps=4, ahead=a))
    assert analysis.slack == tuple(m - a * (p - 1 - s) for s in range(p))
    assert analysis.activations == tuple(a * (p - 1 - s) + 1 for s in range(p))


@SOME
@given(st.integers(2, 16), st.integers(2, 4), st.floats(0.01, 1.5))
@pytest.mark.slow
def test_late_messages_cost_2bw_their_time_and_nothing_where_it_runs_further_ahead(p, rounds, latency):
    m = rounds * p

    def measured(ahead):
        return measure("2bw", stages=p, microbatches=m, ahead=ahead, latency=latency)

    # Down to the last stage and back: p computations and 2 (p - 1) messages in the turns of p micro-batches.
    assert measured(1).seconds == pytest.approx(m * (3 + 2 * latency * (p - 1) / p))
    # One message each way in half a turn: there is always another micro-batch at hand.
    assert measured(2).busy == pytest.approx((1.0,) * p)


@SOME
@given(STAGES, MICROBATCHES)
def test_pipedream_has_the_delay_of_its_depth(p, m):
    analysis = analyze(build("pipedream", stages=p, microbatches=m, steps=ceil(2 * p / m)))
    assert analysis.delay_max == tuple(p - 1 - s for s in range(p))
    assert analysis.versions == tuple(p - s for s in range(p))
    assert set(analysis.mismatch_max) == {0}


@SOME
@given(st.sampled_from(["paci", "pipedream-unstashed"]), STAGES, st.integers(1, 16), st.integers(1, 4))
def test_mismatch_of_paci_is_bounded_and_the_bound_is_reached(name, p, a, times):
    m = a * times
    steps = ceil((3 * p + a) / m) + 1
    analysis = analyze(build(name, stages=p, microbatches=m, steps=steps, update_interval=a))
    assert analysis.mismatch_max == tuple(ceil((p - 1 - s) / a) for s in range(p))
    assert set(analysis.versions) == {1}
