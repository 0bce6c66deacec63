"""What a tracker provides, and the trackers by name: a class in a module of its own, and a line here.

The rows of metrics.jsonl become points of its curves, which run over updates. A resumed run repeats updates:
a `Restart` says from which one on.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from stages.rows import Evaluation, Row, Segment, Start, Step

if TYPE_CHECKING:
    from asyncpp_cli.runs.run_folder import Run


class Tracker(Protocol):
    """Mirrors of runs in the format of a tracker.

    Args:
        folder: of the mirrors.
        project: name that groups the runs.

    Raises:
        UserError: the tracker's library is not installed.
    """

    can_append: ClassVar[bool]
    """Whether a mirror grows with its run; otherwise it is written whole each time."""

    def __init__(self, folder: Path, *, project: str) -> None: ...

    def update(self, run: Run) -> int:
        """Bring the run's mirror up to date; returns the number of rows read."""

    @property
    def hint(self) -> str:
        """The command to run next."""


TRACKERS = {
    "tensorboard": "TensorBoard",
    "wandb": "WeightsAndBiases",
}
"""The class of each tracker, by the name of its module."""


def tracker_class(name: str) -> type[Tracker]:
    """The tracker of this name, a key of `TRACKERS`."""
    module = importlib.import_module(f"asyncpp_cli.trackers.{name}")
    tracker: type[Tracker] = getattr(module, TRACKERS[name])
    return tracker


@dataclass(frozen=True)
class Restart:
    """Points of this update and later ones are void."""

    update: int
    time: float


@dataclass(frozen=True)
class Point:
    """A value of a curve."""

    tag: str
    update: int
    value: float
    time: float
    """Seconds since 1970, as if the attempt had only trained."""


class PointReader:
    """Converts rows, in the order of the file, to points; rows of unknown kinds have none."""

    def __init__(self) -> None:
        self._updates_per_step = 1.0
        self._tokens_per_step = 0
        self._seconds_at: dict[int, float] = {0: 0.0}
        self._offset = 0.0

    def points(self, row: Row) -> Iterator[Point | Restart]:
        """The points of the next row."""
        match row:
            case Start():
                self._tokens_per_step = row.tokens_per_step or 0
                # `seconds` continues from where the earlier attempt was at that update.
                time = row.time or 0.0
                self._offset = time - self._seconds_at.get(row.done, 0.0)
                yield Restart(row.done + 1, time)
            case Step():
                self._updates_per_step = self._tokens_per_step * row.step / row.tokens
                self._seconds_at[row.step] = row.seconds
                values = {
                    "train/loss": row.train_loss,
                    "train/lr": row.lr,
                    "train/grad_norm": row.grad_norm,
                    "train/skipped": float(row.skipped),
                    "train/tokens": row.tokens,
                }
                yield from self._at(row.step, row.seconds, values)
            case Evaluation():
                values = {"val/loss": row.val_loss, "val/loss_ema": row.val_loss_ema}
                values |= {f"val/{name}": loss.val_loss for name, loss in (row.sets or {}).items()}
                yield from self._at(self._update_of(row.step), row.seconds, values)
            case Segment():
                busy = [share for share in row.busy if share is not None]
                delays = [delay for delay in row.delay_max if delay is not None]
                values = {
                    "speed/tokens_per_second": row.tokens_per_second,
                    "speed/bubble": 1 - sum(busy) / len(busy)
                    if busy and len(busy) == len(row.busy)
                    else None,
                    "staleness/delay": max(delays, default=None),
                    "staleness/mismatch": max(row.mismatch_max),
                }
                yield from self._at(self._update_of(row.last_step), row.seconds, values)

    def _update_of(self, step: int) -> int:
        return round(step * self._updates_per_step)

    def _at(self, update: int, seconds: float, values: Mapping[str, float | None]) -> Iterator[Point]:
        time = self._offset + seconds
        for tag, value in values.items():
            if value is not None:
                yield Point(tag, update, float(value), time)
