"""Reductions that begin within a backward, if the next action needs the update.

A schedule that flushes has no other actions after its last backward behind which the reduction could hide.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from schedules.actions import ADDING_NOTHING, Action, Op, Program


def needs_update(action: Action, *, stages: Collection[int], version: int) -> bool:
    """Whether the update of `stages` to `version` must be complete before `action`.

    There is one update at a time, so that all data ranks begin their exchanges in the same order.
    """
    return action.op is Op.UPDATE or (action.stage in stages and action.version >= version)


@dataclass(frozen=True)
class Slack:
    """Facts of the actions between a rank's updates and the first actions that need them."""

    early: frozenset[Action]
    """Last backwards of updates that the next action needs; the reduction begins within them."""
    any: bool
    """Whether any update has other actions before the first that needs it."""


def slack_of(program: Program, rank: int, *, common_step: bool) -> Slack:
    """The slack of a rank's updates.

    Args:
        program: of the segment.
        rank: that updates.
        common_step: whether the stages of a rank update together.
    """
    actions = program.actions[rank]
    here = {action.stage for action in actions}
    early: set[Action] = set()
    any_slack = False
    last: dict[int, tuple[int, Action]] = {}
    unit: dict[int, tuple[int, Action]] = {}
    pending: tuple[frozenset[int], int] | None = None
    finished = 0
    for place, action in enumerate(actions):
        if pending is not None and needs_update(action, stages=pending[0], version=pending[1]):
            pending, finished = None, place
        if action.op is Op.UPDATE:
            unit[action.stage] = last[action.stage]
            if common_step and len(unit) < len(here):
                continue
            pending = frozenset(unit), action.version
            following = actions[place + 1] if place + 1 < len(actions) else None
            if following is not None and not needs_update(following, stages=pending[0], version=pending[1]):
                any_slack = True
            elif all(at >= finished for at, _ in unit.values()):
                early.update(backward for _, backward in unit.values())
            unit = {}
        elif action.op not in ADDING_NOTHING:
            last[action.stage] = place, action
    return Slack(frozenset(early), any_slack)
