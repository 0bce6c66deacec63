"""Reductions in rounds: what they need room for, that nothing is left out, and when they begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import Op, build
from stages.comm import reduction_rounds
from stages.comm.reduction_rounds import ReductionPlan, Round, reduction_plan, room_bytes
from stages.shape.optimizer_sharding import Run, assign_owners
from stages.update.async_update import slack_of

GB = 10**9


def plan_of(sizes: list[int], data_ranks: int, *, stacks: Mapping[int, int] | None = None) -> ReductionPlan:
    """The plan of parameters of these sizes; `stacks`: numbers of those that are stacks of that many rows."""
    stacks = stacks or {}
    shapes = [(stacks[number], 1, size) if number in stacks else (size,) for number, size in enumerate(sizes)]
    entries = list(map(prod, shapes))
    return reduction_plan(entries, assign_owners(shapes, data_ranks=data_ranks), number_bytes=4)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=30),
    data_ranks=st.integers(2, 9),
    round_bytes=st.integers(64, 2_000),
    least=st.integers(1, 50),
    stacks=st.dictionaries(st.integers(0, 29), st.integers(1, 6), max_size=8),
)
def test_rounds_have_every_entry_once_and_only_gradients_that_are_whole(
    sizes: list[int], data_ranks: int, round_bytes: int, least: int, stacks: dict[int, int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction_rounds, "ROUND_BYTES", round_bytes)
        patch.setattr(reduction_rounds, "LEAST_PIECE", least)
        plan = plan_of(sizes, data_ranks, stacks=stacks)
        for rounds in (plan.rounds, plan.early_rounds):
            check_rounds(plan, rounds)
        assert all(one.needs == len(sizes) for one in plan.rounds)
        assert len(plan.rounds) == -(-max(plan.parts) // plan.largest_piece)


def entries_in(runs: Sequence[Run]) -> int:
    return sum(end - start for start, end in runs)


def check_rounds(plan: ReductionPlan, rounds: tuple[Round, ...]) -> None:
    parameter_at = [parameter for parameter in plan.ownership.order for _ in range(plan.sizes[parameter])]
    seen: list[int] = []
    for one in rounds:
        by_owner = [[entry for run in runs for entry in range(*run)] for runs in one.pieces]
        entries = [entry for own in by_owner for entry in own]
        assert len(entries) <= plan.sent_entries()
        for owner, (own, runs) in enumerate(zip(by_owner, one.pieces, strict=True)):
            owned = plan.ownership.runs[owner]
            assert len(plan.parts) * len(own) <= plan.received_entries(owner)
            assert set(own) <= {entry for run in owned for entry in range(*run)}
            assert all(start < end for start, end in runs)
        # The model's last `needs` parameters have their gradients.
        assert all(parameter_at[entry] >= len(plan.sizes) - one.needs for entry in entries)
        seen += entries
    assert sorted(seen) == list(range(sum(plan.sizes)))
    assert [one.needs for one in rounds] == sorted(one.needs for one in rounds)


@pytest.mark.parametrize("data_ranks", [2, 16, 64, 256])
def test_no_buffer_is_as_large_as_a_gigabyte(data_ranks: int) -> None:
    # The matrices of eleven blocks of the 10B model, and its embedding.
    sizes = [49152 * 4096, *([4096 * 14336] * 33), *([4096 * 4096] * 22), *([4096 * 1024] * 22)]
    plan = plan_of(sizes, data_ranks)
    assert max(plan.sent_entries(), plan.received_entries(0)) * 4 <= reduction_rounds.ROUND_BYTES < GB
    assert room_bytes([plan]) <= GB
    assert room_bytes([plan_of(sizes, 1)]) == 0


@pytest.mark.parametrize("data_ranks", [2, 4, 16])
def test_early_rounds_leave_less_after_the_backward_and_waste_little_within_it(data_ranks: int) -> None:
    """A round takes as long as its largest piece."""

    def takes(rounds: list[Round]) -> int:
        return sum(max(map(entries_in, one.pieces)) for one in rounds)

    blocks = [*([1024 * 1024] * 4), *([1024 * 4096] * 3)] * 8
    for sizes in (blocks, [49152 * 1024, *blocks]):
        plan = plan_of(sizes, data_ranks)
        whole = takes(list(plan.rounds))
        assert whole == max(plan.parts)
        within = [one for one in plan.early_rounds if one.needs < len(sizes)]
        after = [one for one in plan.early_rounds if one.needs == len(sizes)]
        sent = sum(entries_in(piece) for one in within for piece in one.pieces)
        assert takes(within) <= sent / len(plan.parts) / reduction_rounds.WORTH_BEGINNING
        # The embedding has its gradient last, and is most of its owner's part.
        assert takes(after) <= (whole if len(sizes) > len(blocks) else whole / 2)


@pytest.mark.parametrize(
    ("schedule", "options", "early"),
    [
        ("gpipe", {}, "all"),
        ("1f1b", {}, "all"),
        ("zero-bubble", {}, "all"),
        ("interleaved-1f1b", {"chunks": 2}, "all"),
        ("2bw", {}, "none"),
        ("paci", {}, "all"),
        # A backward of an older version comes between an update and its reader as it drains.
        ("pipedream", {"update_interval": 1}, "some"),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_reductions_begin_early_where_the_next_action_needs_the_update(
    schedule: str, options: dict[str, int], early: str, ranks: int
) -> None:
    program = build(schedule, stages=ranks, microbatches=2 * ranks, steps=3, **options)
    for rank, actions in enumerate(program.actions):
        common = schedule not in ("paci", "pipedream")
        begun = slack_of(program, rank, common_step=common).early
        updates = sum(action.op is Op.UPDATE for action in actions)
        if early == "some":
            assert 0 < len(begun) <= updates
        else:
            assert len(begun) == (updates if early == "all" else 0)
        # Each is the last backward of its stage before an update.
        for stage in sorted({action.stage for action in actions}):
            of_stage = [a for a in actions if a.stage == stage and a.op is not Op.FORWARD]
            last = {before for before, after in pairwise(of_stage) if after.op is Op.UPDATE}
            assert {action for action in begun if action.stage == stage} <= last
