"""The numbers in metrics rows that are curves, and at which step and time they stand.

Everything stands at the number of updates done, so that what a resumed run does again can be taken back at
once: `Restart` says from which update on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Restart:
    """What was said of this update and later ones no longer holds."""

    update: int
    time: float


@dataclass(frozen=True)
class Point:
    """One number of a curve."""

    tag: str
    update: int
    value: float
    time: float
    """Seconds since 1970, as if the attempt had done nothing but train."""


class Curves:
    """Turns rows, in the order of the file, into points. Rows of a kind that is not known are left out."""

    def __init__(self) -> None:
        self._updates_a_step = 1.0
        self._tokens_a_step = 0
        self._seconds_at: dict[int, float] = {0: 0.0}
        self._offset = 0.0

    def of(self, row: Mapping[str, Any]) -> Iterator[Point | Restart]:
        """What a row says. Of each kind, only the first row of a file may lack what rows of it have."""
        match row["kind"]:
            case "start":
                self._tokens_a_step = row["tokens_per_step"]
                done = row.get("updates", row["step"])
                # `seconds` goes on counting where the earlier attempt was at that update.
                self._offset = row["time"] - self._seconds_at.get(done, 0.0)
                yield Restart(done + 1, row["time"])
            case "step":
                update = row["step"]
                self._updates_a_step = self._tokens_a_step * update / row["tokens"]
                self._seconds_at[update] = row["seconds"]
                yield from self._points(
                    update,
                    row,
                    {
                        "train/loss": row["train_loss"],
                        "train/lr": row["lr"],
                        "train/grad_norm": row["grad_norm"],
                        "train/skipped": float(row["skipped"]),
                        "train/tokens": row["tokens"],
                    },
                )
            case "eval":
                yield from self._points(
                    round(row["step"] * self._updates_a_step), row, {"val/loss": row["val_loss"]}
                )
            case "segment":
                busy, seconds = row["busy"], row["steady_seconds"]
                yield from self._points(
                    round((row["first_step"] + row["steps"]) * self._updates_a_step),
                    row,
                    {
                        "speed/tokens_per_second": row["steady_tokens"] / seconds if seconds else None,
                        "speed/bubble": 1 - sum(busy) / len(busy) if busy else None,
                        "staleness/delay": max(row["delay_max"]),
                        "staleness/mismatch": max(row["mismatch_max"]),
                    },
                )

    def _points(
        self, update: int, row: Mapping[str, Any], values: Mapping[str, float | None]
    ) -> Iterator[Point]:
        time = self._offset + row["seconds"]
        for tag, value in values.items():
            if value is not None:
                yield Point(tag, update, float(value), time)
