"""What a schedule declares about itself is what its programs show."""

from __future__ import annotations

import pytest

from schedules import FAMILY, NAMES, analyze, build

STAGES, MICROBATCHES = 3, 6


@pytest.mark.parametrize("name", NAMES)
def test_declared_facts_are_those_of_the_program(name: str) -> None:
    schedule = FAMILY[name]
    program = build(name, stages=STAGES, microbatches=MICROBATCHES, steps=3)
    assert analyze(program).synchronous == schedule.synchronous
    assert program.updates_together == schedule.updates_together
    assert ("update_interval" in schedule.options) == (not schedule.updates_together)
    assert program.num_stages == STAGES * schedule.stages_per_rank
    default = schedule.default_interval or (lambda microbatches: microbatches)
    assert program.update_interval == default(MICROBATCHES)
    assert ("delay" in schedule.options) == (schedule.lead is not None)


@pytest.mark.parametrize("name", NAMES)
def test_bounded_activations_do_not_grow_with_the_microbatches(name: str) -> None:
    few, many = (
        analyze(build(name, stages=STAGES, microbatches=count, steps=3)).rank_activations
        for count in (2 * STAGES, 4 * STAGES)
    )
    assert (few == many) == FAMILY[name].bounded_activations


@pytest.mark.parametrize(("name", "split"), [("zero-bubble", True), ("zb-v", True), ("1f1b", False)])
def test_a_program_knows_whether_it_splits_backwards(name: str, split: bool) -> None:
    assert build(name, stages=2, microbatches=4, steps=1).split_backward == split
