"""Messages between ranks: as many are held as planned, and a segment cut short leaves nothing behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.small_runs import in_processes

from schedules import NAMES, Op, Program, build
from schedules.catalogue import FAMILY
from schedules.deadlock import sends_in_flight
from schedules.dependencies import _walk, launched, most_messages, places_to_post, updated
from schedules.messages import Kind, Message, received, sent
from stages.comm.p2p import DistributedLinks
from stages.comm.process import Process
from stages.shape.activations import message_width


def exchange(process: Process, given: tuple[str, int]) -> list[list[float]]:
    """What was received in a segment that was cut short after some micro-batches, and in the whole one after
    it; each message holds the number of its micro-batch."""
    schedule, kept = given
    program = build(schedule, stages=2, microbatches=2, steps=4)
    links = DistributedLinks(
        process,
        program,
        name=str(next(process.generations)),
        members=(0, 1),
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


CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in NAMES),
    ("2bw", {"ahead": 2}),
    ("2bw-v", {"ahead": 2}),
    ("2bw-v", {"split": True}),
    *((name, {"shard_head": True}) for name in ("1f1b", "2bw", "2bw-v", "zb-v", "v-half")),
    *((name, {"shard_head": True, "tied": True}) for name in ("1f1b", "gpipe", "2bw", "2bw-v", "zb-v")),
]


WIDTH = 5


class Instant:
    """A communicator, and the work of its operations, which are done at once."""

    def wait(self) -> None:
        pass

    def send(self, *_: object) -> Instant:
        return self

    recv = send


def counted(program: Program, rank: int) -> int:
    """What a rank's links count while the rank performs its actions, as the executor does."""
    process: Any = SimpleNamespace(
        device=torch.device("cpu"), device_waits=False, rank=rank, link=lambda *_: Instant()
    )
    links = DistributedLinks(
        process,
        program,
        name="test",
        members=range(program.num_ranks),
        shape=(WIDTH,),
        dtype=torch.float32,
        common_step=program.updates_together,
    )
    links.begin(program)
    for number, action in enumerate(program.actions[rank]):
        links.passed(launched(number))
        links.passed(updated(number))
        for incoming in received(action, program):
            links.receive(incoming)
        for outgoing in sent(action, program):
            links.send(outgoing, torch.zeros(1))
    return links.most_message_bytes


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (3, 6), (4, 16)])
def test_as_many_messages_are_planned_as_counted(
    name: str, options: dict[str, Any], ranks: int, microbatches: int
) -> None:
    program = build(
        name,
        stages=ranks,
        microbatches=microbatches,
        steps=3,
        chunks=2 if "chunks" in FAMILY[name].options else 1,
        **options,
    )
    together = program.updates_together
    places: list[dict[Message, int]] = [{} for _ in range(ranks)]
    for passage in _walk(program, range(ranks), common_step=together)[0]:
        messages = [Message(*passage.channel, microbatch) for microbatch in passage.microbatches]
        places[passage.link.receiver].update(zip(messages, passage.places, strict=True))
    assert places == [places_to_post(program, rank, common_step=together) for rank in range(ranks)]
    weights = {kind: 4 * message_width(kind, width=WIDTH, per_wide=1) for kind in Kind}
    planned = most_messages(
        program, common_step=together, in_flight=sends_in_flight(program), weights=weights
    )
    assert planned == [counted(program, rank) for rank in range(ranks)]
