"""A run's rows on their way to the recorder: one process writes them, which knows the loss."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from stages.metrics import Recorder
from stages.record import step_row
from stages.trace import StepResult

HEARTBEAT_SECONDS = 0.5


class Rows:
    """The rows of a run, as one of its processes sees them.

    Args:
        recorder: keeps them; None: another process writes.
        tokens_per_update: tokens whose gradient one update applies.
    """

    def __init__(self, recorder: Recorder | None, *, tokens_per_update: int) -> None:
        self._recorder = recorder
        self.tokens_per_update = tokens_per_update
        self.train_losses: list[float] = []
        self._heartbeat = (0, 0.0)

    def begin(self, *, updates: int) -> None:
        """Training begins after `updates` updates."""
        self._heartbeat = (updates, time.perf_counter())

    def write(self, row: Mapping[str, Any]) -> None:
        """Keep a row, if this process writes."""
        if self._recorder is not None:
            self._recorder.append(row)

    def timeline(self, timeline: Mapping[str, Any]) -> None:
        """Keep the timeline of the latest segment, if this process writes."""
        if self._recorder is not None:
            self._recorder.timeline(timeline)

    def step(self, result: StepResult, *, seconds: float) -> None:
        """An update of the last stage, after so many seconds of training."""
        self.train_losses.append(result.train_loss)
        self.write(step_row(result, tokens=result.version * self.tokens_per_update, seconds=seconds))
        version, then = self._heartbeat
        now = time.perf_counter()
        if self._recorder is not None and now - then >= HEARTBEAT_SECONDS:
            tokens = (result.version - version) * self.tokens_per_update
            self._recorder.heartbeat(
                result.version, train_loss=result.train_loss, tokens_per_second=tokens / (now - then)
            )
            self._heartbeat = (result.version, now)

    def flush(self) -> None:
        """See that the rows are on the disk: no checkpoint is newer than the metrics."""
        if self._recorder is not None:
            self._recorder.flush()
