"""The ranks of an attempt that did not train to their end, in one file that all others look at.

    attempts/N/fallen.json       {"fallen": [{"rank": 3, "failed": true, "time": 1763776800.0}]}

It keeps the first two ranks that failed and the first two that were ended: so each rank finds one beside
itself if there is one, and the file stays small however many fall.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

FALLEN = "fallen"
"""The file's name, without `.json`."""

_MOST_OF_A_KIND = 2


@dataclass(frozen=True)
class Fall:
    """That a rank did not train to its end."""

    rank: int
    failed: bool
    """By itself: not since it was told to end, or made to, nor without a word."""
    time: float
    """Seconds since 1970."""


def falls_in(content: Mapping[str, Any] | None) -> list[Fall]:
    """The falls that the file's content tells.

    Raises:
        KeyError, TypeError, ValueError: it tells none, and is damaged.
    """
    falls = []
    for fall in content["fallen"] if content is not None else ():
        rank, failed, time = fall["rank"], fall["failed"], fall["time"]
        if type(rank) is not int or type(failed) is not bool or type(time) not in (int, float):
            raise TypeError(f"{fall!r:.60} is no fall of a rank")
        falls.append(Fall(rank, failed, float(time)))
    return falls


def with_fall(falls: list[Fall], fall: Fall) -> dict[str, Any] | None:
    """The file's content with one more fall; None if it need not be told."""
    of_its_kind = [other for other in falls if other.failed == fall.failed]
    if len(of_its_kind) == _MOST_OF_A_KIND or any(other.rank == fall.rank for other in falls):
        return None
    return {FALLEN: [asdict(other) for other in (*falls, fall)]}
