"""Where the work of an update is queued: beside the actions of the pipeline, where a device has two queues.

On one queue an update would begin behind the actions that the host has launched ahead, phase after phase. On
one of its own its phases follow each other, and only an action that needs the update waits for it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class Streams(Protocol):
    """The queues of one device: that of the actions, and that of the updates."""

    parallel: bool
    """Whether there are two; if not, all is done in the order in which it is asked for."""

    def fork(self) -> None:
        """Let what comes into the updates' queue wait for what the actions' queue has by now."""

    def beside(self) -> AbstractContextManager[Any]:
        """What is launched in this context comes into the updates' queue."""

    def point(self) -> Any:
        """This point in the updates' queue."""

    def join(self, point: Any) -> None:
        """Let what comes into the actions' queue wait for a point in the updates'."""


class OneStream:
    """Where the host computes."""

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
    """Those of a GPU."""

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
    """The queues of what is computed on `device`."""
    return CudaStreams(device) if device.type == "cuda" else OneStream()
