"""Reductions that begin within a backward, if the next action needs the update.

A schedule that flushes has no other actions after its last backward behind which the reduction could hide.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

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


class WholeGradients:
    """Reports during a stage's last backward which of its gradients are complete.

    Args:
        parameters: of the stage, in the model's order.
        advance: called with the number of parameters, counted from the last, whose gradients are complete.
    """

    def __init__(self, parameters: Sequence[Tensor], *, advance: Callable[[int], None]) -> None:
        self._parameters = parameters
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._advance = advance
        self._missing = set(range(len(parameters)))
        self._first_whole = len(parameters)

    def leave(self, parameters: Collection[Tensor]) -> None:
        """All gradients are complete except those of `parameters`; those of other stages do not count."""
        numbers = (self._numbers.get(id(parameter)) for parameter in parameters)
        self._missing = {number for number in numbers if number is not None}

    def note(self, parameter: Tensor) -> None:
        """The gradient of `parameter` is complete; nothing happens if it is of another stage."""
        if id(parameter) not in self._numbers:
            return
        self._missing.discard(self._numbers[id(parameter)])
        before = self._first_whole
        while self._first_whole and self._first_whole - 1 not in self._missing:
            self._first_whole -= 1
        if self._first_whole < before:
            self._advance(len(self._parameters) - self._first_whole)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note each gradient that a backward in this context completes."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(self.note)  # type: ignore[no-untyped-call]
            for parameter in self._parameters
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
