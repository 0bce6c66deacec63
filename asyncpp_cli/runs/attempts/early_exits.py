"""Ranks of an attempt that did not train to the end, in one file that all supervisors watch.

    attempts/N/fallen.json       {"fallen": [{"rank": 3, "failed": true, "time": 1763776800.0}]}

The file keeps the first two ranks that failed and the first two that were made to end: enough for every rank
to see one other than itself, and small however many ranks exit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

EARLY_EXITS = "fallen"
"""The file's name, without `.json`."""

_MAX_PER_KIND = 2


@dataclass(frozen=True)
class EarlyExit:
    """A rank that did not train to the end."""

    rank: int
    failed: bool
    """It failed by itself: it was neither stopped, nor did it vanish without recording its end."""
    time: float
    """Seconds since 1970."""


def parse_early_exits(content: Mapping[str, Any] | None) -> list[EarlyExit]:
    """The early exits in the file's content; none if there is no file.

    Raises:
        KeyError, TypeError, ValueError: the content is damaged.
    """
    early_exits = []
    for entry in content["fallen"] if content is not None else ():
        rank, failed, time = entry["rank"], entry["failed"], entry["time"]
        if type(rank) is not int or type(failed) is not bool or type(time) not in (int, float):
            raise TypeError(f"{entry!r:.60} is not an early exit")
        early_exits.append(EarlyExit(rank, failed, float(time)))
    return early_exits


def with_early_exit(early_exits: Sequence[EarlyExit], new: EarlyExit) -> dict[str, Any] | None:
    """The file's content with one more early exit; None if it does not need to be added."""
    same_kind = [other for other in early_exits if other.failed == new.failed]
    if len(same_kind) == _MAX_PER_KIND or any(other.rank == new.rank for other in early_exits):
        return None
    return {EARLY_EXITS: [asdict(other) for other in (*early_exits, new)]}
