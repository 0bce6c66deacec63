"""What one stage needs to run by itself: neighbours that are made up, and always ready."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from schedules import Program
from schedules.dependencies import POSTED_AHEAD, Place
from schedules.messages import Message
from stages.comm.collectives import Exchange, Reduction
from stages.update.reduction_rounds import ReductionPlan


class MadeUpNeighbours:
    """In the place of links to other processes: what is received is there at once, what is sent is let go.

    It has as many buffers as links between processes have, those that wait for what comes next included.

    Args:
        neighbours: of the stage, 1 or 2.
        shape: of every activation and gradient.
        dtype: likewise.
        device: likewise.
    """

    waits = True

    def __init__(
        self, *, neighbours: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self._content = torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
        self._posted = [torch.empty_like(self._content) for _ in range(neighbours * POSTED_AHEAD)]
        self.most_message_bytes = sum(buffer.nbytes for buffer in self._posted)

    def connect(self) -> None:
        pass

    def begin(self, program: Program) -> None:
        pass

    def passed(self, place: Place) -> None:
        pass

    def send(self, message: Message, tensor: Tensor) -> None:
        pass

    def arrived(self, message: Message) -> bool:
        return True

    def receive(self, message: Message) -> Tensor:
        return self._content.clone()

    def finish(self) -> None:
        pass


class MadeUpPipeline:
    """In the place of the group of a pipeline's ranks: the others bring what this one brings."""

    def __init__(self, *, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_gather(self, numbers: Tensor) -> Exchange[list[Tensor]]:
        return Exchange(ready=lambda: True, wait=lambda: None, take=lambda: [numbers] * self.size)

    def reduce_scatter(
        self, flat: Tensor, plan: ReductionPlan, *, early: bool, part: Tensor | None = None
    ) -> Reduction:
        raise NotImplementedError("gradients are added over data ranks, not along a pipeline")

    def broadcast(self, flat: Tensor, bounds: Sequence[int]) -> Exchange[None]:
        raise NotImplementedError("weights are spread over data ranks, not along a pipeline")
