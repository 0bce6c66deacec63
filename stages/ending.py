"""Where stages update on their own: at which step do all ranks end, once one of them is told to?

No update brings all ranks together there. So each of them tells the others at the end of every step, and goes
on; before it begins a step some steps later (`schedules.dependencies.steps_to_agree`) it must have heard from
all. By then they have long told it, so nobody waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch

from schedules.actions import Action, Op, Program
from schedules.dependencies import steps_to_agree
from stages.copies import to_host
from stages.groups import Exchange, Group, sum_in_order


@dataclass
class _Told:
    step: int
    """Before which the ranks end, if one was told to."""
    phases: Generator[Exchange[Any], None, None]
    awaited: Exchange[Any]


class Agreement:
    """What the ranks of a pipeline tell each other in a segment.

    Args:
        pipeline: its ranks.
        end: called with the step before which all of them end.
    """

    def __init__(self, pipeline: Group, *, end: Callable[[int], None]) -> None:
        self._pipeline = pipeline
        self._end = end
        self._told: deque[_Told] = deque()

    def begin(self, program: Program) -> None:
        """Make ready for a segment."""
        self._microbatches = program.microbatches
        self._lag = steps_to_agree(program)
        self._end_step = program.first_step + program.steps

    def tell(self, step: int, *, stop: bool, device: torch.device) -> None:
        """Begin to tell the others, after the last update of `step`, whether this rank is to end."""
        before = step + 1 + self._lag
        if before >= self._end_step:
            return
        phases = self._phases(before, torch.full((1,), float(stop), dtype=torch.float64, device=device))
        self._told.append(_Told(before, phases, awaited=next(phases)))

    def _phases(self, step: int, stop: torch.Tensor) -> Generator[Exchange[Any], None, None]:
        shared = self._pipeline.share(stop)
        yield shared
        coming = to_host(sum_in_order(shared.take()))
        yield coming
        if coming.take()[0] > 0:
            self._end(step)

    def go_on(self, *, before: Action | None) -> Exchange[Any] | None:
        """Hear what has come; gives what must be waited for before `before` begins (None: before the drain),
        and then `heard`, if there is such a thing."""
        while self._told:
            oldest = self._told[0]
            if not oldest.awaited.ready():
                return oldest.awaited if self._is_needed(before, oldest.step) else None
            self.heard()
        return None

    def _is_needed(self, before: Action | None, step: int) -> bool:
        return before is None or (before.op is Op.FORWARD and before.microbatch >= step * self._microbatches)

    def heard(self) -> None:
        """What was waited for is there."""
        oldest = self._told[0]
        try:
            oldest.awaited = next(oldest.phases)
        except StopIteration:
            self._told.popleft()
