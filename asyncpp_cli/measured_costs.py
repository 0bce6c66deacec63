"""What a run measured of its ranks, as costs for the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncpp_cli.errors import UserError
from asyncpp_cli.runs import open_run
from schedules.costs import RankTimes


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """What the segments of a run say of its ranks."""

    stages: int
    microbatches: int
    times: RankTimes


def measured_run(folder: Path) -> MeasuredRun:
    """The computing times of the run in `folder`, means over its segments.

    Raises:
        UserError: no segment of it was measured.
    """
    rows = open_run(folder).metrics()
    starts = [row for row in rows if row["kind"] == "start"]
    times = rank_times(row for row in rows if row["kind"] == "segment")
    if not starts or times is None:
        raise UserError(f"{folder}: no segment of it was measured (replays are not)")
    return MeasuredRun(stages=len(times.forward), microbatches=starts[-1]["microbatches"], times=times)


def rank_times(segments: Iterable[Mapping[str, Any]]) -> RankTimes | None:
    """The computing times of each rank from `segment` rows, means over them; None if none was measured."""
    measured = [row for row in segments if row.get("action_seconds")]
    if not measured:
        return None
    ranks = len(measured[0]["busy"])
    backward = _of_ranks(measured, "B", ranks=ranks)
    half = [seconds / 2 for seconds in backward]
    return RankTimes(
        forward=tuple(_of_ranks(measured, "F", ranks=ranks)),
        input_half=tuple(_of_ranks(measured, "I", ranks=ranks) if not any(backward) else half),
        weight_half=tuple(_of_ranks(measured, "W", ranks=ranks) if not any(backward) else half),
        update=tuple(_of_ranks(measured, "U", ranks=ranks)),
    )


def _of_ranks(segments: Sequence[Mapping[str, Any]], op: str, *, ranks: int) -> list[float]:
    """Seconds of one `op` at each rank, its stages together: stage s is on rank s modulo the ranks."""
    steps = sum(segment["steps"] for segment in segments)
    total = [0.0] * ranks
    for segment in segments:
        for stage, seconds in enumerate(segment["action_seconds"].get(op, [])):
            total[stage % ranks] += seconds * segment["steps"] / steps
    return total
