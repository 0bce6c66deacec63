"""What the schedules with a V-shaped placement share: rank r holds stages r and 2 p - 1 - r.

The model goes down the ranks and comes back up, so the last rank holds two neighbouring stages, and rank 0
the first and the last.
"""

from __future__ import annotations

from collections import Counter, deque

from schedules.actions import Op
from schedules.segment import Slot


def placement(ranks: int) -> list[int]:
    """The rank of each of the 2 p stages."""
    return [*range(ranks), *reversed(range(ranks))]


class RankOrder:
    """The order of one rank within a step, built slot by slot; each stage's micro-batches come in turn.

    Args:
        microbatches: Micro-batches a step; slots of any further micro-batch are dropped.
    """

    def __init__(self, microbatches: int) -> None:
        self.slots: list[Slot] = []
        self._microbatches = microbatches
        self._forwards: Counter[int] = Counter()
        self._backwards: Counter[int] = Counter()
        self._weight_halves: deque[tuple[int, int]] = deque()

    def forward(self, stage: int) -> None:
        """The forward of the stage's next micro-batch."""
        self._add(stage, Op.FORWARD, self._forwards[stage])
        self._forwards[stage] += 1

    def backward(self, stage: int) -> None:
        """The whole backward of the stage's next micro-batch."""
        self._add(stage, Op.BACKWARD, self._backwards[stage])
        self._backwards[stage] += 1

    def input_half(self, stage: int) -> None:
        """The input half of the backward of the stage's next micro-batch."""
        self._add(stage, Op.BACKWARD_INPUT, self._backwards[stage])
        self._weight_halves.append((stage, self._backwards[stage]))
        self._backwards[stage] += 1

    def weight_half(self, stage: int | None = None) -> None:
        """The weight half that has waited longest, of `stage` or of either stage; nothing if none waits."""
        for waiting in self._weight_halves:
            if stage is None or waiting[0] == stage:
                self._weight_halves.remove(waiting)
                self._add(waiting[0], Op.BACKWARD_WEIGHT, waiting[1])
                return

    def _add(self, stage: int, op: Op, microbatch: int) -> None:
        if microbatch < self._microbatches:
            self.slots.append(Slot(stage, op, microbatch))
