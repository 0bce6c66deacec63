"""The stream of a device that updates run on, beside the pipeline's actions, and copies from it to the host.

On one stream, each phase of an update would begin behind the actions that the host has launched ahead. On a
stream of their own, the phases follow each other, and only an action that needs the update waits for it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from stages.comm.collectives import Exchange


class Streams(Protocol):
    """The streams of one device: of the actions, and of the updates."""

    parallel: bool
    """Whether there are two; if not, all work runs in the order of the calls."""

    def fork(self) -> None:
        """Make later work on the updates' stream wait for the work on the actions' stream so far."""

    def beside(self) -> AbstractContextManager[Any]:
        """Work launched in this context goes to the updates' stream."""

    def point(self) -> Any:
        """The current point on the updates' stream."""

    def join(self, point: Any) -> None:
        """Make later work on the actions' stream wait for a point on the updates'."""


class OneStream:
    """For a CPU: one order of execution."""

    parallel = False

    def fork(self) -> None:
        pass

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def point(self) -> None:
        return None

    def join(self, point: None) -> None:
        pass


class CudaStreams:
    """The streams of a GPU."""

    parallel = True

    def __init__(self, device: torch.device) -> None:
        self._updates = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fork(self) -> None:
        self._updates.wait_stream(torch.cuda.current_stream(self._updates.device))

    def beside(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(self._updates)
        return context

    def point(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._updates.record_event()
        return event

    def join(self, point: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._updates.device).wait_event(point)


def streams_of(device: torch.device) -> Streams:
    """The streams of `device`."""
    return CudaStreams(device) if device.type == "cuda" else OneStream()


def to_host(numbers: Tensor) -> Exchange[list[float]]:
    """Start copying a row of numbers to the host."""
    if not numbers.is_cuda:
        return Exchange(ready=lambda: True, wait=lambda: None, take=numbers.tolist)
    copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    copy.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return Exchange(ready=copied.query, wait=copied.synchronize, take=copy.tolist)
