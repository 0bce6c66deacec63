"""The periodic block of a V: exact tiling, dependencies, and lifetimes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.library.v_block import VBlock, v_block


@settings(max_examples=25)
@given(
    ranks=st.integers(1, 16),
    forward=st.integers(1, 3),
    backward=st.integers(1, 4),
    weight=st.integers(0, 2),
    message=st.integers(0, 4),
)
@pytest.mark.slow
def test_ranks_are_never_idle_and_messages_have_their_time(
    ranks: int, forward: int, backward: int, weight: int, message: int
) -> None:
    block = v_block(ranks=ranks, forward=forward, backward=backward, weight=weight, message=message)
    assert block.period == 2 * (forward + backward + weight)
    last = 2 * ranks - 1
    for rank in range(ranks):
        busy = [0] * block.period
        for stage in (rank, last - rank):
            spans = [(block.forward[stage], forward), (block.backward[stage], backward)]
            end = block.backward[stage] + backward
            if block.weight is not None:
                assert block.weight[stage] >= end
                spans.append((block.weight[stage], weight))
                end = block.weight[stage] + weight
            assert block.lifetimes[stage] == end - block.forward[stage]
            for start, cost in spans:
                for time in range(start, start + cost):
                    busy[time % block.period] += 1
        assert busy == [1] * block.period
    for stage in range(last):
        between = 0 if stage == ranks - 1 else message
        assert block.forward[stage + 1] >= block.forward[stage] + forward + between
        assert block.backward[stage] >= block.backward[stage + 1] + backward + between
    assert block.backward[last] >= block.forward[last] + forward


def fullest(block: VBlock) -> int:
    """The longest lifetime over ranks, both stages of a rank added."""
    return max(near + far for near, far in zip(block.lifetimes, reversed(block.lifetimes), strict=True))


@pytest.mark.parametrize(
    ("weight", "share"),
    [(0, {2: 1.75, 4: 2.75, 8: 5.75, 16: 10.75}), (1, {2: 1.5, 4: 22 / 12, 8: 3.5, 16: 70 / 12})],
)
def test_activations_of_the_fullest_rank(weight: int, share: dict[int, float]) -> None:
    """In micro-batches of a rank's share of the model: about 2 p / 3, and p / 3 with split backwards."""
    for ranks, expected in share.items():
        block = v_block(ranks=ranks, forward=1, backward=2 - weight, weight=weight, message=0)
        assert fullest(block) / block.period / 2 == pytest.approx(expected)
