"""Replay: all ranks take turns in one process."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any


def drive(parts: Sequence[Iterator[None] | Generator[None, None, Any]]) -> list[Any]:
    """Advance the parts in turn until all have ended; returns their results."""
    results: list[Any] = [None] * len(parts)
    going = dict(enumerate(parts))
    while going:
        for index, part in list(going.items()):
            try:
                next(part)
            except StopIteration as stop:
                results[index] = stop.value
                del going[index]
    return results
