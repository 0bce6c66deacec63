"""Our programs beside torch's: lowered lists, the order of messages, activations in flight.

torch 2.15 is the first that waits for sends in its lists and that analyzes the lives of activations.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from schedules import Program, analyze, build
from schedules.io.torch_lists import from_lists, to_csv
from schedules.messages import sent_between_ranks

liveness = pytest.mark.skipif(
    not hasattr(torch_schedules, "analyze_pipeline_activation_liveness"), reason="needs torch 2.15"
)

TORCHS = {
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
"""Those that torch runs by a list. It runs 1F1B by loops, so ours is lowered instead."""

GEOMETRIES = [(p, m * p) for p in (2, 4, 8) for m in (1, 2, 4)]
CASES = [
    (name, p, m)
    for name in ("1f1b", *TORCHS)
    for p, m in GEOMETRIES
    if name != "dualpipe-v" or m >= 2 * p  # torch refuses fewer
]


def both(name: str, p: int, m: int) -> tuple[Program, Any]:
    """Our program of a step, and torch's schedule with its lowered lists."""
    chunks = 1 if name == "1f1b" else 2
    ours = build(name, stages=p, microbatches=m, steps=1, chunks=chunks)
    outlines = [
        SimpleNamespace(
            stage_index=chunk * p,
            num_stages=p * chunks,
            group_rank=0,
            group_size=p,
            group=None,
            submod=None,
            has_backward=True,
            device="cpu",
            is_first=chunk == 0,
            is_last=chunk * p == p * chunks - 1,
        )
        for chunk in range(chunks)
    ]
    if name in TORCHS:
        theirs = getattr(torch_schedules, TORCHS[name])(outlines, m)
        if not hasattr(theirs, "pipeline_order_with_comms"):
            pytest.skip("this torch does not lower the list itself")
        return ours, theirs
    theirs = torch_schedules._PipelineScheduleRuntime(outlines, m)
    rows = [row.split(",") for row in to_csv(ours).splitlines()]
    actions = [[torch_schedules._Action.from_str(cell) for cell in row] for row in rows]
    theirs._prepare_schedule_with_comms(dict(enumerate(actions)))
    return ours, theirs


def parts(actions: Any) -> Any:
    """The actions of a list, without those that are None, and pairs one by one."""
    for action in actions:
        if action is not None:
            yield from action.sub_actions or (action,)


@pytest.mark.parametrize(("name", "p", "m"), CASES)
def test_lowered_lists_are_read_as_our_programs(name: str, p: int, m: int) -> None:
    ours, theirs = both(name, p, m)
    lists = theirs.pipeline_order_with_comms
    read = from_lists([lists[rank] for rank in range(p)], name=name, steps=1)
    assert read.actions == ours.actions
    assert read.rank_of_stage == ours.rank_of_stage
    kinds = {str(action.computation_type.value) for actions in lists.values() for action in parts(actions)}
    if hasattr(torch_schedules, "WAIT_SEND_F"):
        assert {"SEND_F", "WAIT_SEND_F", "RECV_B", "WAIT_SEND_B"} <= kinds


@pytest.mark.parametrize(("name", "p", "m"), CASES)
def test_messages_of_a_pair_of_ranks_are_posted_in_torchs_order(name: str, p: int, m: int) -> None:
    """On each directed edge of ranks, which has a communicator of its own with `pipeline_per_edge_p2p`."""
    ours, theirs = both(name, p, m)
    sends: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    receives: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for rank, actions in theirs.pipeline_order_with_comms.items():
        for action in parts(actions):
            kind, stage = action.computation_type.value, action.stage_index
            other = stage + (1 if kind in ("SEND_F", "RECV_B") else -1)
            if kind in ("SEND_F", "SEND_B"):
                pair = rank, ours.rank_of_stage[other]
                sends.setdefault(pair, []).append((stage, other, action.microbatch_index))
            elif kind in ("RECV_F", "RECV_B"):
                pair = ours.rank_of_stage[other], rank
                receives.setdefault(pair, []).append((other, stage, action.microbatch_index))
    assert sends == {
        pair: [tuple(each) for each in found] for pair, found in sent_between_ranks(ours).items()
    }
    assert receives == sends


@liveness
@pytest.mark.parametrize(("name", "p", "m"), CASES)
def test_activations_in_flight_are_torchs_slots(name: str, p: int, m: int) -> None:
    ours, theirs = both(name, p, m)
    analysis = analyze(ours)
    for rank in range(p):
        stages = [stage for stage, holder in enumerate(ours.rank_of_stage) if holder == rank]

        def slots(stages: list[int], rank: int = rank) -> int:
            found = torch_schedules.analyze_pipeline_activation_liveness(
                theirs, pp_rank=rank, stage_indices=stages, granularity="stage_microbatch"
            )
            return int(found.num_slots)

        assert slots(stages) == analysis.rank_activations[rank]
        for stage in stages:
            assert slots([stage]) == analysis.activations[stage]
