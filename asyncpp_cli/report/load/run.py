"""A run with its measurements, as far as its folder can be read."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from asyncpp_cli.experiment.template import SHORTHANDS
from asyncpp_cli.report.load.checks import Prediction
from asyncpp_cli.report.load.measure import Measurement
from asyncpp_cli.runs.attempts.cost import Cost
from asyncpp_cli.runs.run_folder import Lineage

if TYPE_CHECKING:
    import polars as pl

Settings = frozenset[tuple[str, str]]
"""Keys with their values as text, to compare."""

_Item = TypeVar("_Item")


def settings_of(values: Mapping[str, Any]) -> Settings:
    """The values that tell cells apart: all but the seed and the site."""
    return frozenset(
        (key, repr(value)) for key, value in values.items() if key != "seed" and not key.startswith("site.")
    )


def only(settings: Settings, *names: str) -> Settings:
    """The settings of these keys; a name that ends with a dot is that of a section."""
    sections = tuple(name for name in names if name.endswith("."))
    return frozenset(each for each in settings if each[0] in names or each[0].startswith(sections))


def grouped(items: Iterable[_Item], key_of: Callable[[_Item], Hashable]) -> list[list[_Item]]:
    """Items with the same key in one list, in the order of the first of each."""
    groups: dict[Hashable, list[_Item]] = {}
    for item in items:
        groups.setdefault(key_of(item), []).append(item)
    return list(groups.values())


STATES_BY_WEIGHT = (
    "failed",
    "damaged",
    "unreadable",
    "interrupted",
    "running",
    "paused",
    "pending",
    "missing",
    "completed",
)
"""States by the attention they need: a cell has the first of these that one of its runs has."""


UNFINISHED = ("running", "paused", "pending")
"""States of runs whose numbers are still to come."""


@dataclass(frozen=True, kw_only=True)
class RunResult(Measurement):
    """A run, with its numbers: the row of a report that all else is made from."""

    id: str
    axes: Mapping[str, Any]
    """Its point in the matrix, by axis."""
    config: Mapping[str, Any] | None
    """Its resolved configuration by dotted key; None if it cannot be read."""
    state: str
    """One of `STATES_BY_WEIGHT`."""
    folder: Path | None = None
    reason: str | None = None
    """Why it failed, was interrupted or cannot be read."""
    progress: float | None = None
    """Share of its steps that are done, by its status; None if it has not begun."""
    restarts: int = 0
    """Attempts after the first."""
    steps: pl.DataFrame | None = None
    """Its `step` rows (`Metrics.steps`), if the loader keeps them."""
    prediction: Prediction | None = None
    """What its schedule predicts; None if unknown."""
    mfu: float | None = None
    """Model FLOP/s utilisation (MFU) in 0..1; None if unknown."""
    cost: Cost | None = None
    """Cost of all its attempts so far; None if it has not begun, or did not record its resources."""
    loss_of: str | None = None
    """Id of the run whose loss is its own, too, if it ran for its speed alone; it has no losses then."""
    site: str = ""
    """The site profile that it was submitted with last; empty if it was not submitted."""
    lineage: Lineage | None = None
    """The run that it continues; None for a run from the beginning."""
    problems: tuple[str, ...] = ()
    """Faults of its files that leave its numbers usable."""

    def value(self, key: str) -> Any:
        """The value of a configuration key or axis; None if unknown."""
        dotted = SHORTHANDS.get(key, key)
        of_axis = self.axes.get(key, self.axes.get(dotted))
        # A key that is gone stays an axis of old experiments.
        return of_axis if self.config is None else self.config.get(dotted, of_axis)

    @property
    def diverged(self) -> bool:
        """Whether its loss is not finite, or it failed in steps whose gradients were not."""
        if self.state == "completed":
            loss = self.val_loss
            return loss is not None and not math.isfinite(loss)
        return self.state == "failed" and self.skipped_last > 0

    @property
    def ranks(self) -> int | None:
        """Number of processes of the run."""
        stages = self.value("parallel.stages")
        return None if stages is None else int(stages) * int(self.value("parallel.data") or 1)

    @property
    def tokens_per_second_per_rank(self) -> float | None:
        speed = self.tokens_per_second
        return speed / self.ranks if speed is not None and self.ranks else None
