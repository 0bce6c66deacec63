"""The step at which all ranks stop, once one is asked to, in schedules whose stages update on their own.

No exchange of an update involves all ranks there. So every rank sends the others a flag at the end of each
step and goes on; it needs all flags only before it begins a step some steps later
(`schedules.dependencies.steps_to_agree`). They have arrived by then, so no rank waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch

from schedules.actions import Action, Op, Program
from schedules.dependencies import steps_to_agree
from stages.comm.collectives import Exchange, Group, sum_in_order
from stages.update.host_copies import to_host


@dataclass
class _Exchanged:
    step: int
    """The step before which the ranks end, if one of them was asked to stop."""
    phases: Generator[Exchange[Any], None, None]
    awaited: Exchange[Any]


class Agreement:
    """The flags that the ranks of a pipeline exchange in a segment.

    Args:
        pipeline: its ranks.
        end: called with the step before which all ranks end.
    """

    def __init__(self, pipeline: Group, *, end: Callable[[int], None]) -> None:
        self._pipeline = pipeline
        self._end = end
        self._exchanged: deque[_Exchanged] = deque()

    def begin(self, program: Program) -> None:
        """Prepare for a segment."""
        self._microbatches = program.microbatches
        self._lag = steps_to_agree(program)
        self._end_step = program.first_step + program.steps

    def tell(self, step: int, *, stop: bool, device: torch.device) -> None:
        """After the last update of `step`, begin to send whether this rank was asked to stop."""
        before = step + 1 + self._lag
        if before >= self._end_step:
            return
        phases = self._phases(before, torch.full((1,), float(stop), dtype=torch.float64, device=device))
        self._exchanged.append(_Exchanged(before, phases, awaited=next(phases)))

    def _phases(self, step: int, stop: torch.Tensor) -> Generator[Exchange[Any], None, None]:
        shared = self._pipeline.all_gather(stop)
        yield shared
        coming = to_host(sum_in_order(shared.take()))
        yield coming
        if coming.take()[0] > 0:
            self._end(step)

    def go_on(self, *, before: Action | None) -> Exchange[Any] | None:
        """Take the flags that have arrived.

        Returns:
            The exchange that must complete before the action `before` (None: before the drain); the caller
            waits for it and then calls `heard`. None if there is none.
        """
        while self._exchanged:
            oldest = self._exchanged[0]
            if not oldest.awaited.ready():
                return oldest.awaited if self._is_needed(before, oldest.step) else None
            self.heard()
        return None

    def _is_needed(self, before: Action | None, step: int) -> bool:
        return before is None or (before.op is Op.FORWARD and before.microbatch >= step * self._microbatches)

    def heard(self) -> None:
        """The exchange that `go_on` returned has completed."""
        oldest = self._exchanged[0]
        try:
            oldest.awaited = next(oldest.phases)
        except StopIteration:
            self._exchanged.popleft()
