"""A head that shares the embedding's matrix: against one process, and against the same run untied."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.small_runs import small_config

from optimizers.grouping import Role
from schedules import NAMES, Op, build
from stages.config.run_config import RunConfig, changed
from stages.resolve.schedule import can_tie, tied_problem
from stages.shape.families import describe


def tied_config(schedule: str, **given: Any) -> RunConfig:
    name, _, split = schedule.partition(", ")
    options = {"stages": 2, "microbatches": 4, "layers": 5} | given
    config = small_config(name, split=bool(split), **options)
    return changed(config, {"model.tied": True})


@pytest.mark.parametrize("schedule", NAMES)
def test_a_schedule_declares_whether_its_ends_can_share_a_matrix(schedule: str) -> None:
    program = build(schedule, stages=2, microbatches=4, steps=3)
    assert (tied_problem(program) is None) == (schedule in can_tie())


def test_the_matrix_is_counted_once_and_computed_with_twice() -> None:
    config = tied_config("2bw-v")
    tied, untied = (describe(replace(config.model, tied=choice)) for choice in (True, False))
    matrix = config.model.vocab_size * config.model.width
    assert tied.parameter_count == untied.parameter_count - matrix
    assert tied.training_flops(context=12) == untied.training_flops(context=12)
    assert tied.role("embedding.weight") is Role.EMBEDDING
    assert [parameter.name for parameter in tied.whole() if "head" in parameter.name] == []


def test_an_order_in_which_the_gradients_of_two_steps_would_mix_is_refused() -> None:
    program = build("2bw-v", stages=2, microbatches=4, steps=3)
    assert tied_problem(program) is None
    actions = list(program.actions[0])
    updates = [place for place, action in enumerate(actions) if action.op is Op.UPDATE]
    assert [actions[place].stage for place in updates] == [3, 0] * 3
    first, second = updates[:2]
    actions[first], actions[second] = actions[second], actions[first]
    swapped = replace(program, actions=(tuple(actions), *program.actions[1:]))
    assert "needs the last stage to update before the first ends its step" in str(tied_problem(swapped))
