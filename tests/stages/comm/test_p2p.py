"""Messages between processes: a segment that is cut short leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from support.small_runs import in_processes

from schedules import Op, build
from schedules.dependencies import updated
from schedules.messages import received, sent
from stages.comm.p2p import DistributedLinks
from stages.comm.process import Process


def exchange(process: Process, given: tuple[str, int]) -> list[list[float]]:
    """What was received in a segment that was cut short after some micro-batches, and in the whole one after
    it; each message holds the number of its micro-batch."""
    schedule, kept = given
    program = build(schedule, stages=2, microbatches=2, steps=4)
    links = DistributedLinks(
        process,
        name=str(next(process.generations)),
        members=(0, 1),
        rank_of_stage=(0, 1),
        shape=(1,),
        dtype=torch.float32,
        common_step=True,
    )
    got: list[list[float]] = []
    for microbatches in (kept, 8):
        links.begin(program)
        got.append([])
        for number, action in enumerate(program.actions[process.rank]):
            links.passed(updated(number))
            if action.op is Op.UPDATE or action.microbatch >= microbatches:
                continue
            for incoming in received(action, program):
                got[-1].append(float(links.receive(incoming)))
            for outgoing in sent(action, program):
                links.send(outgoing, torch.full((1,), float(action.microbatch)))
        links.finish()
    return got


@pytest.mark.slow
def test_a_segment_that_is_cut_short_leaves_no_receive_open() -> None:
    cases = [(schedule, kept) for schedule in ("1f1b", "2bw") for kept in (0, 2, 4, 6, 8)]
    for by_case in in_processes(exchange, cases, size=2):
        for (_, kept), got in zip(cases, by_case, strict=True):
            assert got == [[float(number) for number in range(count)] for count in (kept, 8)]
