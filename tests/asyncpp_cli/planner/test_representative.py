"""The short program that stands for a run's, beside one of all of its micro-batches."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

import schedules
from asyncpp_cli.planner.representative import Shape, _built, _few, messages, represented
from schedules import analyze
from schedules.deadlock import sends_in_flight
from schedules.dependencies import most_messages
from schedules.messages import Kind
from stages.memory.estimate import course_of
from stages.memory.in_flight import Moment
from stages.weights.gradient_buffers import gradient_buffers

UNFLUSHED = [name for name, schedule in schedules.FAMILY.items() if not schedule.synchronous]
SIZES = (1000, 1000, 1000, 1016, 8, 1000, 1000)
"""Bytes of a message of each kind, of which those of a head in shards differ."""


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Of schedules that are never flushed, with more micro-batches than enter before one is back."""
    name = draw(st.sampled_from(UNFLUSHED))
    schedule, stages = schedules.FAMILY[name], draw(st.integers(2, 8))
    shard_head = schedule.can_shard_head and draw(st.booleans())
    ahead, split = draw(st.integers(1, 2)), draw(st.booleans())
    asked = {"ahead": ahead, "split": split}
    options = {option: value for option, value in asked.items() if option in schedule.options}
    microbatches = stages * options.get("ahead", 1) + draw(st.integers(2, 3 * stages))
    if "delay" in schedule.options:
        options["delay"] = schedules.smallest_delay(
            name, stages=stages, microbatches=microbatches, shard_head=shard_head, **options
        )
    return Shape(
        name,
        stages,
        microbatches,
        tuple(options.items()),
        shard_head,
        shard_head and draw(st.booleans()),
        several_data_ranks=draw(st.booleans()),
        on_gpu=draw(st.booleans()),
    )


@given(shapes())
def test_few_microbatches_have_the_memory_the_delay_and_the_messages_of_many(shape):
    assume(_few(shape) is not None)
    program = _built(shape, steps=3)
    run = represented(shape)
    assert run.course == course_of([program])
    assert run.delay == max(analyze(program).delay_max)
    assert run.rank_of_stage == program.rank_of_stage
    data_ranks = 1 + shape.several_data_ranks
    assert list(run.buffers) == gradient_buffers([program], data_ranks=data_ranks, on_gpu=shape.on_gpu)
    weights = dict(zip(Kind, SIZES, strict=True))
    in_flight = sends_in_flight(program)
    together = program.updates_together
    held = most_messages(program, common_step=together, in_flight=in_flight, weights=weights)
    assert list(messages(shape, SIZES)) == held


@given(
    st.sampled_from([name for name, schedule in schedules.FAMILY.items() if schedule.can_shard_head]),
    st.integers(2, 6),
    st.integers(1, 16),
    st.integers(0, 10),
)
def test_with_shards_of_the_head_a_rank_holds_one_more_forward(name, stages, microbatches, half):
    """What `most_blocks` takes for granted, of a block whose micro-batch has 10 bytes, and `half` between the
    halves of a backward."""

    def moments(*, shard_head: bool) -> list[frozenset[Moment]]:
        options: dict[str, int] = {}
        if "delay" in schedules.FAMILY[name].options:
            options["delay"] = schedules.smallest_delay(
                name, stages=stages, microbatches=microbatches, shard_head=shard_head
            )
        shape = Shape(name, stages, microbatches, tuple(options.items()), shard_head, False, False, False)
        try:
            return list(represented(shape).course.moments)
        except schedules.ScheduleError:
            assume(False)
            raise

    for plain, sharded in zip(moments(shard_head=False), moments(shard_head=True), strict=True):
        of_blocks = len(next(iter(plain)).counts)  # behind them are those of the shard
        least = max(
            min(
                10 * (wholes + (wholes > 0 and wholes + halves < microbatches)) + half * halves
                for wholes, halves in moment.counts
            )
            for moment in plain
        )
        assert least <= max(
            min(10 * wholes + half * halves for wholes, halves in moment.counts[:of_blocks])
            for moment in sharded
        )
