"""What a run measured of its ranks, as costs for the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncpp_cli.errors import UserError
from asyncpp_cli.runs import open_run


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """What the segments of a run say of its ranks."""

    stages: int
    microbatches: int
    seconds: tuple[float, ...]
    """By rank, the time that it computes for a micro-batch."""


def measured_run(folder: Path) -> MeasuredRun:
    """The computing times of the run in `folder`, from its steady stretches of all segments."""
    rows = open_run(folder).metrics()
    starts = [row for row in rows if row["kind"] == "start"]
    segments = [
        row for row in rows if row["kind"] == "segment" and row["steady_tokens"] and None not in row["busy"]
    ]
    if not starts or not segments:
        raise UserError(
            f"{folder}: no segment of it was measured (replays and runs of a step or two are not)"
        )
    tokens = starts[-1]["microbatch_size"] * starts[-1]["context"]
    microbatches = sum(row["steady_tokens"] for row in segments) / tokens
    busy = [[share * row["steady_seconds"] for share in row["busy"]] for row in segments]
    return MeasuredRun(
        stages=len(busy[0]),
        microbatches=starts[-1]["microbatches"],
        seconds=tuple(sum(times) / microbatches for times in zip(*busy, strict=True)),
    )
