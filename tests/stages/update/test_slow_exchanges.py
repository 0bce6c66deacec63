"""Reductions and norms that take longer than the slack hold up, change nothing, and end in no deadlock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.small_runs import Rows, small_config
from support.training_cases import measured

from schedules import Op, ScheduleError, build
from schedules.messages import received, sent
from stages.comm.collectives import Exchange, InProcessGroup
from stages.trainer import replay


def slow_down(patch: pytest.MonkeyPatch, group: type, *, polls: int) -> None:
    """Let nothing that ranks exchange be ready before it has been asked for some times."""

    def slow(begin: Callable[..., Exchange[Any]]) -> Callable[..., Exchange[Any]]:
        def begin_slowly(*args: Any, **kwargs: Any) -> Exchange[Any]:
            exchange = begin(*args, **kwargs)
            left = iter(range(polls))
            return replace(exchange, ready=lambda: next(left, None) is None and exchange.ready())

        return begin_slowly

    for name in ("all_gather", "reduce_scatter", "broadcast"):
        patch.setattr(group, name, slow(getattr(group, name)))


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "options"),
    [
        *(("2bw", stages, microbatches, {}) for stages, microbatches in ((2, 1), (4, 3), (4, 8))),
        # Messages that depend on an update come before the first action that needs it.
        ("2bw-v", 2, 2, {"delay": 2, "eval_interval": 9}),
        ("2bw", 3, 5, {"ahead": 2, "shard_head": True, "eval_interval": 9}),
    ],
)
@pytest.mark.slow
def test_exchanges_that_take_longer_than_the_slack_hold_up_but_change_nothing(
    schedule: str,
    stages: int,
    microbatches: int,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = small_config(schedule, stages=stages, data=2, microbatches=microbatches, steps=5, **options)
    quick, slow = Rows(), Rows()
    replay(config, recorder=quick)
    slow_down(monkeypatch, InProcessGroup, polls=200)
    replay(config, recorder=slow)
    assert measured(slow) == measured(quick)


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("gpipe", {}),
        ("1f1b", {}),
        ("zero-bubble", {}),
        ("interleaved-1f1b", {"chunks": 2}),
        ("2bw", {"delay": 1}),
        ("2bw", {"delay": 2}),
        ("2bw", {"delay": 3}),
        ("2bw", {"ahead": 2}),
        ("2bw", {"ahead": 3, "delay": 2}),
    ],
)
def test_no_rank_waits_for_a_message_from_one_that_waits_for_its_part_of_an_update(
    schedule: str, options: dict[str, int], stages: int
) -> None:
    """While a rank waits for a message, the update that it has begun stands still. So whoever sends that
    message must not need the update before; but where the receiver has needed it, too, it is done."""
    for microbatches in (1, 2, 3, 4, 6, 7, 8, 14, 21):
        try:
            program = build(schedule, stages=stages, microbatches=microbatches, steps=5, **options)
        except ScheduleError:
            continue
        place = {
            action: (rank, at)
            for rank, list_ in enumerate(program.actions)
            for at, action in enumerate(list_)
        }
        needed: dict[tuple[int, int], int] = {}
        for action, (rank, at) in place.items():
            # An update needs the one before it.
            for version in range(1, action.version + (action.op is not Op.UPDATE)):
                needed[rank, version] = min(at, needed.get((rank, version), at))
        sent_by = {message: action for action in place for message in sent(action, program)}
        for action, (rank, at) in place.items():
            for message in received(action, program):
                sender, sent_at = place[sent_by[message]]
                for version in range(1, 6):
                    if needed.get((sender, version), sent_at + 1) <= sent_at:
                        assert needed.get((rank, version), at + 1) <= at, (action, version)
