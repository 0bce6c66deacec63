"""How many runs of each array may go on at once, where SLURM bounds each array alone: here it is played."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from asyncpp_cli.launch.job.array_task import ArrayLoad, receiving_array
from asyncpp_cli.launch.submission.arrays import Throttle, throttles


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.integers(1, 400))
def test_max_parallel_holds_over_all_arrays(sizes: list[int], at_once: int) -> None:
    found = throttles(sizes, at_once=at_once)
    assert all(1 <= turn.at_once <= size for turn, size in zip(found, sizes, strict=True))
    assert all(turn.after is None or turn.after < index for index, turn in enumerate(found))
    # An array is followed by one at most, so what may run together is what begins without another.
    followed = [turn.after for turn in found if turn.after is not None]
    assert len(followed) == len(set(followed))
    lanes = [turn for turn in found if turn.after is None]
    assert sum(turn.at_once for turn in lanes) == min(at_once, sum(sizes))
    assert all(turn.at_once == 1 for turn in found) or not followed


def test_arrays_take_about_as_many_rounds() -> None:
    assert throttles([50, 50, 100], at_once=4) == [Throttle(1), Throttle(1), Throttle(2)]
    assert throttles([1, 50], at_once=7) == [Throttle(1), Throttle(6)]
    assert throttles([3, 5], at_once=None) == throttles([3, 5], at_once=100) == [Throttle(3), Throttle(5)]
    six = throttles([40, 10, 10, 10, 5, 5], at_once=2)
    assert six == [Throttle(1), Throttle(1), Throttle(1, 1), Throttle(1, 2), Throttle(1, 3), Throttle(1, 4)]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 20), st.integers(0))
def test_places_are_passed_on_and_never_more_run_than_was_said(
    sizes: list[int], at_once: int, seed: int
) -> None:
    """Runs take any time, and are put back into the queue now and then."""
    chance = random.Random(seed)
    planned = throttles(sizes, at_once=at_once)
    bound = [turn.at_once for turn in planned]
    left, running = list(sizes), [0] * len(sizes)
    while any(left):
        for index, turn in enumerate(planned):
            if turn.after is None or not left[turn.after]:
                running[index] = min(left[index], bound[index])
        assert sum(running) <= at_once
        if all(turn.after is None for turn in planned):
            # No place stays empty while a run waits.
            assert sum(running) == min(at_once, sum(left))
        ending = chance.choice([index for index in range(len(sizes)) if running[index]])
        running[ending] -= 1
        if chance.randrange(5) == 0:
            continue  # queued again
        left[ending] -= 1
        arrays = [
            ArrayLoad(
                name=str(index),
                tasks=left[index],
                at_once=bound[index],
                follows=turn.after is not None and left[turn.after] + (turn.after == ending) > 0,
            )
            for index, turn in enumerate(planned)
        ]
        follower = next((arrays[i] for i, turn in enumerate(planned) if turn.after == ending), None)
        others = [array for index, array in enumerate(arrays) if index != ending and array.tasks]
        found = receiving_array(arrays[ending], others, follower=follower)
        if found is not None:
            bound[int(found.name)] += 1
