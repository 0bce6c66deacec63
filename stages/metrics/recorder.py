"""The interface through which a trainer reports its measurements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from stages.checkpoint.files import FileEntry


class Recorder(Protocol):
    """Receives a run's measurements. Only the rank of the last stage, which has the loss, calls it."""

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row to the run's metrics; its `kind` is start, step, eval, segment, pause or
        end."""

    def timeline(self, timeline: Mapping[str, Any]) -> None:
        """Replace the timeline: when the ranks performed the latest actions of a segment."""

    def flush(self) -> None:
        """Sync all rows to the disk; called before a checkpoint is completed."""

    def written(self) -> FileEntry | None:
        """Size and SHA-256 of all rows so far; None if they are kept nowhere."""

    def has_rows(self, step: int) -> bool:
        """Whether the rows that were written before the checkpoint of a step are still there."""

    def heartbeat(self, step: int, *, train_loss: float, tokens_per_second: float) -> None:
        """Report that the run makes progress, after `step` steps."""
