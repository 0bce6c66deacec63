"""Compute times measured by a run, as costs for the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.runs.experiment_folder import run_at
from schedules.costs import RankTimes


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """Geometry and compute times of a run."""

    stages: int
    """Pipeline ranks."""
    microbatches: int
    times: RankTimes


def measured_run(folder: Path) -> MeasuredRun:
    """Compute times of the run in `folder`, averaged over its segments.

    Raises:
        UserError: no segment was measured, or a row is damaged.
    """
    try:
        return _measured_run(folder)
    except KeyError as error:
        raise UserError(f"{folder}: metrics.jsonl: a row lacks {error.args[0]}") from error


def _measured_run(folder: Path) -> MeasuredRun:
    rows = run_at(folder).metrics()
    starts = [row for row in rows if row["kind"] == "start"]
    segments = [row for row in rows if row["kind"] == "segment"]
    times = rank_times(segments, starts[-1]["rank_of_stage"]) if starts else None
    if times is None:
        raise UserError(f"{folder}: no segment of it was measured (replays are not)")
    return MeasuredRun(stages=len(times.forward), microbatches=starts[-1]["microbatches"], times=times)


def rank_times(segments: Iterable[Mapping[str, Any]], rank_of_stage: Sequence[int]) -> RankTimes | None:
    """Compute times of each rank, averaged over `segment` rows; None if no row has times.

    Args:
        segments: the rows.
        rank_of_stage: rank of each stage.
    """
    measured = [row for row in segments if row.get("action_seconds")]
    if not measured:
        return None
    ranks = len(measured[0]["busy"])

    def of_op(op: str) -> tuple[float, ...]:
        return _rank_seconds(measured, op, rank_of_stage=rank_of_stage, ranks=ranks)

    # A whole backward counts as two equal halves; a schedule may have whole and split backwards.
    half = [seconds / 2 for seconds in of_op("B")]
    return RankTimes(
        forward=of_op("F"),
        input_half=of_op("I") if not any(half) else tuple(half),
        weight_half=of_op("W") if not any(half) else tuple(half),
        update=of_op("U"),
    )


def _rank_seconds(
    segments: Sequence[Mapping[str, Any]], op: str, *, rank_of_stage: Sequence[int], ranks: int
) -> tuple[float, ...]:
    """Mean seconds of one `op` at each rank, summed over the rank's stages."""
    steps = sum(segment["steps"] for segment in segments)
    total = [0.0] * ranks
    for segment in segments:
        for rank, seconds in zip(rank_of_stage, segment["action_seconds"].get(op, []), strict=False):
            total[rank] += (seconds or 0.0) * segment["steps"] / steps
    return tuple(total)
