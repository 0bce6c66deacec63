"""What torch's profiler (Kineto) records of a process's first steps, and torch's memory when it runs out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from schedules.actions import Action, Op


class StepProfiler:
    """Records the first steps that a process trains in an attempt; each action is a span.

    Args:
        file: a Chrome trace to write.
        steps: to record, at most those of the first segment.
        device: of the process.
    """

    def __init__(self, file: Path, *, steps: int, device: torch.device) -> None:
        self._file = file
        self._steps = steps
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profile: profile | None = None
        self._is_recording = False
        self._is_over = False

    def begin(self, *, first_step: int, microbatches: int) -> None:
        """Begin with the process's first segment; later ones are not recorded."""
        if self._is_over:
            return
        self._after = (first_step + self._steps) * microbatches
        self._profile = profile(activities=self._activities)
        self._profile.start()
        self._is_recording = True

    def around(self, action: Action) -> AbstractContextManager[object]:
        """The span of an action. The first one of a later step ends the recording."""
        if self._profile is None or not self._is_recording:
            return nullcontext()
        if action.op is not Op.UPDATE and action.microbatch >= self._after:
            # Ending the profile synchronises the device, which may wait for an open receive: at the drain.
            self._is_recording = False
            self._profile.toggle_collection_dynamic(False, self._activities)
            return nullcontext()
        return record_function(str(action))

    def drained(self) -> None:
        """Write the file. No receive may be open."""
        if self._profile is None:
            return
        self._profile.stop()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._file))
        self._profile, self._is_recording, self._is_over = None, False, True


@contextmanager
def memory_snapshot(file: Path | None, *, with_history: bool) -> Iterator[None]:
    """If the device runs out of memory in this block, write what torch's allocator holds, for
    pytorch.org/memory_viz.

    Args:
        file: to write; None: none.
        with_history: whether to record each allocation's stack, which takes time.
    """
    history = file is not None and with_history and torch.cuda.is_available()
    if history:
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
    try:
        yield
    except torch.OutOfMemoryError:
        if file is not None:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                torch.cuda.memory._dump_snapshot(str(file))  # type: ignore[no-untyped-call]
            except (OSError, RuntimeError, AssertionError) as error:
                print(f"no memory snapshot: {error}", file=sys.stderr)
            else:
                print(f"memory snapshot for pytorch.org/memory_viz: {file}", file=sys.stderr)
        raise
    finally:
        if history:
            torch.cuda.memory._record_memory_history(enabled=None)
