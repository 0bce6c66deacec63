"""The periodic block of a V: exact tiling, dependencies, and the shortest lifetimes there are."""

from __future__ import annotations

from itertools import product

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


def by_trying_all(*, forward: int, backward: int, weight: int) -> int:
    """The shortest `fullest` for two ranks, over all waits of less than a period between its actions."""
    period = 2 * (forward + backward + weight)
    costs = [forward] * 4 + [backward] * 4
    best = 10**9
    for waits in product(range(period), repeat=7):
        if sum(waits) >= 2 * period:
            continue
        starts = [0]
        for cost, wait in zip(costs, waits, strict=False):
            starts.append(starts[-1] + cost + wait)
        lifetimes = []
        for stages in ((0, 3), (1, 2)):
            free = set(range(period))
            for stage in stages:
                free -= {(starts[stage] + k) % period for k in range(forward)}
                free -= {(starts[7 - stage] + k) % period for k in range(backward)}
            if len(free) != 2 * weight:
                break
            ends = [starts[7 - stage] + backward for stage in stages]
            total = sum(ends) - sum(starts[stage] for stage in stages)
            if weight:
                # Weight halves of one unit each, in either of the two free places.
                one, other = sorted(free)
                total += 2 + min(
                    (one - ends[0]) % period + (other - ends[1]) % period,
                    (other - ends[0]) % period + (one - ends[1]) % period,
                )
            lifetimes.append(total)
        else:
            best = min(best, max(lifetimes))
    return best


@pytest.mark.parametrize(("forward", "backward", "weight"), [(1, 1, 0), (1, 2, 0), (1, 1, 1)])
def test_no_block_for_two_ranks_is_shorter(forward: int, backward: int, weight: int) -> None:
    block = v_block(ranks=2, forward=forward, backward=backward, weight=weight, message=0)
    assert fullest(block) == by_trying_all(forward=forward, backward=backward, weight=weight)


@pytest.mark.parametrize(
    ("weight", "share"),
    [(0, {2: 1.75, 4: 2.75, 8: 5.75, 16: 10.75}), (1, {4: 22 / 12, 8: 3.5, 16: 70 / 12})],
)
def test_activations_of_the_fullest_rank(weight: int, share: dict[int, float]) -> None:
    """In micro-batches of a rank's share of the model: about 2 p / 3, and p / 3 with split backwards."""
    for ranks, expected in share.items():
        block = v_block(ranks=ranks, forward=1, backward=2 - weight, weight=weight, message=0)
        assert fullest(block) / block.period / 2 == pytest.approx(expected)
