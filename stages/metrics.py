"""What a trainer tells of itself while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Recorder(Protocol):
    """Where a run's measurements go. Only the rank of the last stage, which knows the loss, writes."""

    def append(self, row: Mapping[str, Any]) -> None:
        """Keep one row of the run's metrics for good; its `kind` is start, step, eval, segment or end."""

    def timeline(self, timeline: Mapping[str, Any]) -> None:
        """Keep when the ranks did the last actions of a segment, in place of what was kept before."""

    def flush(self) -> None:
        """See that all rows are on the disk: a checkpoint that follows vouches for them."""

    def heartbeat(self, step: int, *, train_loss: float, tokens_per_second: float) -> None:
        """Say that the run is alive, after `step` updates."""
