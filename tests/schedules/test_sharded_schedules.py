"""The programs of `fsdp` and `hsdp`: one stage, whose processes share a step's micro-batches."""

from __future__ import annotations

import pytest

from schedules import Op, ScheduleError, analyze, build, find, verify


@pytest.mark.parametrize("name", ["fsdp", "hsdp"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 4), (4, 4), (3, 12)])
def test_a_process_has_its_share_of_the_micro_batches(name: str, stages: int, microbatches: int) -> None:
    program = build(name, stages=stages, microbatches=microbatches, steps=3)
    verify(program)
    assert program.num_ranks == program.num_stages == 1
    assert program.microbatches == program.update_interval == microbatches // stages
    forwards = [action for action in program.actions[0] if action.op is Op.FORWARD]
    assert len(forwards) == 3 * microbatches // stages
    assert analyze(program).synchronous
    assert find(name).synchronous


def test_micro_batches_that_cannot_be_shared_are_refused_with_numbers_that_can() -> None:
    with pytest.raises(ScheduleError, match=r"multiple of 4, such as 4 or 8$"):
        build("fsdp", stages=4, microbatches=6, steps=1)
    with pytest.raises(ScheduleError, match=r"multiple of 4, such as 4$"):
        build("hsdp", stages=4, microbatches=3, steps=1)
