"""Reductions and norms that take longer than the slack hold up and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.small_runs import replayed, small_config
from support.training_cases import measured

from stages.comm.collectives import Exchange, InProcessGroup


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
    quick = measured(replayed(config))
    slow_down(monkeypatch, InProcessGroup, polls=200)
    assert measured(replayed(config)) == quick
