"""In an evaluation micro-batches follow each other through all ranks: none of them waits for long."""

from __future__ import annotations

from typing import Any

import pytest

from schedules import Program, build
from schedules.actions import Op
from schedules.messages import Message, is_local, received, sent
from stages.pipeline.evaluation import forward_program

SECONDS = {Op.FORWARD: 1.0, Op.HEAD: 0.3, Op.EMBED: 0.05, Op.LOSS: 0.02}
ON_THE_WAY = 0.1
"""Of a message."""


def times(program: Program) -> tuple[float, float]:
    """Seconds until the last rank has ended, and that the busiest one computes."""
    arrived: dict[Message, float] = {}
    left = [list(actions) for actions in program.actions]
    ended, busy = [0.0] * program.num_ranks, [0.0] * program.num_ranks
    while any(left):
        before = sum(map(len, left))
        for rank, actions in enumerate(left):
            while actions and all(message in arrived for message in received(actions[0], program)):
                action = actions.pop(0)
                incoming = [arrived[message] for message in received(action, program)]
                ended[rank] = max([ended[rank], *incoming]) + SECONDS[action.op]
                busy[rank] += SECONDS[action.op]
                for message in sent(action, program):
                    arrived[message] = ended[rank] + (0 if is_local(message, program) else ON_THE_WAY)
        assert sum(map(len, left)) < before, f"ranks wait for each other before {left}"
    return max(ended), max(busy)


@pytest.mark.parametrize("stages", [2, 3, 8])
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {}),
        ("1f1b", {"shard_head": True}),
        ("2bw", {"shard_head": True, "tied": True}),
        ("2bw-v", {"delay": 2}),
        ("zb-v", {"shard_head": True}),
        ("2bw-v", {"delay": 2, "shard_head": True, "tied": True}),
        ("interleaved-1f1b", {"chunks": 2}),
        ("interleaved-1f1b", {"chunks": 4}),
    ],
)
def test_ranks_are_busy_once_all_have_begun(schedule: str, options: dict[str, Any], stages: int) -> None:
    trained = build(schedule, stages=stages, microbatches=2 * stages, steps=2, **options)
    took, busy = {}, {}
    for microbatches in (32, 96):
        program = forward_program(trained, microbatches=microbatches, version=1, data_rank=0, data_ranks=1)
        took[microbatches], busy[microbatches] = times(program)
    assert took[96] - took[32] <= 1.05 * (busy[96] - busy[32])
