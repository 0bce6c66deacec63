"""Messages that a rank holds at once: planned from the program, and counted by the links that send them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from schedules import NAMES, Program, build
from schedules.catalogue import FAMILY
from schedules.deadlock import sends_in_flight
from schedules.dependencies import _places_of_all, launched, most_messages, places_to_post, updated
from schedules.messages import Kind, received, sent
from stages.comm.message_widths import message_width
from stages.comm.p2p import DistributedLinks

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
    process: Any = SimpleNamespace(device=torch.device("cpu"), rank=rank, link=lambda *_: Instant())
    links = DistributedLinks(
        process,
        name="test",
        members=range(program.num_ranks),
        rank_of_stage=program.rank_of_stage,
        head_shards=program.head_shards,
        tied_shards=program.tied_shards,
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
    places = _places_of_all(program, common_step=together)
    assert places == [places_to_post(program, rank, common_step=together) for rank in range(ranks)]
    weights = {kind: 4 * message_width(kind, width=WIDTH, per_wide=1) for kind in Kind}
    planned = most_messages(
        program, common_step=together, in_flight=sends_in_flight(program), weights=weights
    )
    assert planned == [counted(program, rank) for rank in range(ranks)]
