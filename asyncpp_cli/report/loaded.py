"""A run as the report sees it, whatever is left of its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncpp_cli.report.measure import Measurement

if TYPE_CHECKING:
    import polars as pl

NAMED_KEYS = {
    "schedule": "schedule.name",
    "optimizer": "optimizer.name",
    "error_feedback": "error_feedback.coefficient",
    "model": "model.name",
}
"""The axes that have a column of their own, by the name that templates give them."""

STATES_BY_WEIGHT = ("failed", "damaged", "interrupted", "running", "pending", "missing", "completed")
"""A cell has the state of the run that most needs attention: the first of these that one of its runs has."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: what it is, how it stands, what it measured."""

    id: str
    axes: Mapping[str, Any]
    """Its point in the matrix, by the template's axis names."""
    config: Mapping[str, Any] | None
    """Its resolved configuration by dotted key; None if it could not be read."""
    state: str
    """One of `STATES_BY_WEIGHT`."""
    folder: Path | None = None
    reason: str | None = None
    """Why it failed, was interrupted or cannot be read."""
    progress: float | None = None
    """Share of its steps that are done, as its status says; None if it has not begun."""
    restarts: int = 0
    """How many times it was started again."""
    measurement: Measurement = field(default_factory=Measurement)
    steps: pl.DataFrame | None = None
    """Its `step` rows (see `rows.Metrics`), where they were asked for."""
    bubble_predicted: float | None = None
    """Share of the steady state in which a rank waits by the schedule alone: equal stages, free messages."""
    utilisation: float | None = None
    """Share of the devices' peak arithmetic that the model's own needs (MFU); None where it is unknown."""
    problems: tuple[str, ...] = ()
    """What is wrong with its files although its numbers could be used."""

    def value(self, key: str) -> Any:
        """The value of a configuration key or axis; None if unknown."""
        dotted = NAMED_KEYS.get(key, key)
        if self.config is not None:
            return self.config.get(dotted)
        return self.axes.get(key, self.axes.get(dotted))

    @property
    def ranks(self) -> int | None:
        """Processes of the run, each on a GPU of its own where there are GPUs."""
        stages = self.value("parallel.stages")
        return None if stages is None else int(stages) * int(self.value("parallel.data") or 1)

    @property
    def tokens_per_second_per_rank(self) -> float | None:
        speed = self.measurement.tokens_per_second
        return speed / self.ranks if speed is not None and self.ranks else None
