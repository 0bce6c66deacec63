"""The slowest rank of a run, and the slowest of the processes that do the same work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncpp_cli.report.load.metrics_rows import MetricsRow


@dataclass(frozen=True, kw_only=True)
class Slowest:
    """Where others wait."""

    rank: int
    """Of the pipeline: the one that computes longest for a micro-batch, mean over its data ranks."""
    ratio: float
    """Its seconds over the mean of all ranks."""
    peer: tuple[int, int] | None
    """Rank and data rank of the process that takes longest, compared with the other data ranks of its rank;
    None: there is one data rank."""
    peer_ratio: float | None
    """Its seconds over the mean of those others."""
    host: str | None
    """Its machine; without data ranks that of `rank`."""


def slowest(segments: Sequence[MetricsRow], start: MetricsRow | None) -> Slowest | None:
    """From the measured times of a run's segments; None where there are none, or one rank alone.

    Raises:
        KeyError, TypeError or ValueError: a row lacks a field, or one is not a number.
    """
    measured = [row for row in segments if row.get("compute_seconds")]
    if not measured:
        return None
    steps = sum(row["steps"] for row in measured)
    seconds = [
        [sum(took) / steps for took in zip(*of_rank, strict=True)]
        for of_rank in zip(*map(_in_all_steps, measured), strict=True)
    ]
    by_rank = [sum(of_rank) / len(of_rank) for of_rank in seconds]
    mean = sum(by_rank) / len(by_rank)
    peers = {
        (rank, data_rank): took * (len(of_rank) - 1) / (sum(of_rank) - took)
        for rank, of_rank in enumerate(seconds)
        for data_rank, took in enumerate(of_rank)
        if sum(of_rank) > took
    }
    if mean <= 0 or (len(by_rank) == 1 and not peers):
        return None
    rank = by_rank.index(max(by_rank))
    peer = max(peers, key=peers.__getitem__, default=None)
    at_rank, at_data_rank = peer or (rank, 0)
    hosts = measured[-1].get("hosts")
    host = hosts[at_rank][at_data_rank] if hosts else (start or {}).get("host")
    return Slowest(
        rank=rank,
        ratio=by_rank[rank] / mean,
        peer=peer,
        peer_ratio=peers[peer] if peer else None,
        host=None if host is None else str(host),
    )


def _in_all_steps(row: MetricsRow) -> list[list[float]]:
    return [[row["steps"] * float(took or 0.0) for took in of_rank] for of_rank in row["compute_seconds"]]
