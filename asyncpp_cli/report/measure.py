"""One run's metrics rows, turned into the numbers that a report shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncpp_cli.report.rows import Metrics

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One evaluation of a run."""

    step: int
    tokens: int
    """Trained on before it."""
    seconds: float
    """Training time before it."""
    val_loss: float
    """Nats a token."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What the metrics of one run say; None where they do not (yet) say it."""

    steps_done: int = 0
    """Updates that the metrics account for."""
    evaluations: tuple[Evaluation, ...] = ()
    val_loss: float | None = None
    """Nats a token, of the last evaluation."""
    bits_per_byte: float | None = None
    """The same in bits per byte of text."""
    unigram_bits_per_byte: float | None = None
    """Entropy of the single bytes of the same text: what a model without context can reach at best."""
    tokens_per_second: float | None = None
    """In steady state: evaluations, and the filling and draining of the pipeline, are not in it."""
    delay: int | None = None
    """Updates between the weights of a gradient and those it was applied to, as counted; the largest."""
    mismatch: int | None = None
    """Versions between a micro-batch's forward and its backward, as counted; the largest."""
    bubble: float | None = None
    """Share of the steady state that a rank waited, mean over ranks, in 0..1."""
    bubble_by_rank: tuple[float, ...] = ()
    peak_memory: tuple[float, ...] = ()
    """Bytes, the largest of the run, of each rank of the pipeline: what its device had allocated, or where
    there is no such count, what the run itself holds."""
    skipped_steps: int = 0
    """Steps left out because a gradient was not finite."""
    seconds: float | None = None
    """Training time, without evaluations."""
    start: Row | None = None
    """The `start` row of the last attempt: where and with what the run ran."""
    segments: tuple[Row, ...] = ()

    @property
    def replayed(self) -> bool:
        """Whether one process took the turns of all ranks: its times say nothing about a pipeline."""
        return bool(self.start is not None and self.start.get("replayed"))

    def first_at(self, target: float) -> Evaluation | None:
        """The first evaluation with a validation loss of at most `target`, nats a token."""
        return next((one for one in self.evaluations if one.val_loss <= target), None)


def measure(metrics: Metrics) -> Measurement:
    """The numbers in a run's metrics.

    Raises:
        KeyError, TypeError or ValueError: a row lacks a field that its kind has, or one is no number.
    """
    by_kind: dict[str, list[Row]] = {}
    for row in metrics.others:
        by_kind.setdefault(row["kind"], []).append(row)
    start = by_kind["start"][-1] if "start" in by_kind else None
    segments = by_kind.get("segment", [])
    evaluations = tuple(_evaluation(row) for row in by_kind.get("eval", []))
    val_loss = evaluations[-1].val_loss if evaluations else None
    bubble_by_rank = _bubble_by_rank(segments)
    steps = metrics.steps
    seconds = [float(row["seconds"]) for kind in ("eval", "segment", "end") for row in by_kind.get(kind, [])]
    if len(steps):
        seconds.append(float(steps["seconds"][-1]))
    return Measurement(
        steps_done=int(steps["step"].max() or 0) if len(steps) else 0,  # type: ignore[arg-type]
        evaluations=evaluations,
        val_loss=val_loss,
        bits_per_byte=_bits_per_byte(val_loss, start),
        unigram_bits_per_byte=_of_start(start, "unigram_bits_per_byte"),
        tokens_per_second=_tokens_per_second(segments),
        delay=max((delay for row in segments for delay in row["delay_max"]), default=None),
        mismatch=max((mismatch for row in segments for mismatch in row["mismatch_max"]), default=None),
        bubble=sum(bubble_by_rank) / len(bubble_by_rank) if bubble_by_rank else None,
        bubble_by_rank=bubble_by_rank,
        peak_memory=_peak_memory(segments),
        skipped_steps=int(steps["skipped"].sum()) if len(steps) else 0,
        seconds=max(seconds, default=None),
        start=start,
        segments=tuple(segments),
    )


def _evaluation(row: Row) -> Evaluation:
    return Evaluation(
        step=int(row["step"]),
        tokens=int(row["tokens"]),
        seconds=float(row["seconds"]),
        val_loss=float(row["val_loss"]),
    )


def _of_start(start: Row | None, name: str) -> float | None:
    value = start.get(name) if start is not None else None
    return float(value) if value is not None else None


def _bits_per_byte(val_loss: float | None, start: Row | None) -> float | None:
    bytes_per_token = _of_start(start, "bytes_per_token")
    if val_loss is None or not bytes_per_token:
        return None
    return val_loss / math.log(2) / bytes_per_token


def _tokens_per_second(segments: Sequence[Row]) -> float | None:
    seconds = sum(row["steady_seconds"] for row in segments)
    if seconds <= 0:
        return None
    return float(sum(row["steady_tokens"] for row in segments) / seconds)


def _bubble_by_rank(segments: Sequence[Row]) -> tuple[float, ...]:
    """For each rank, the share of the run's steady windows that it waited: segments count by their length."""
    measured = [
        row for row in segments if row["steady_seconds"] > 0 and row["busy"] and None not in row["busy"]
    ]
    seconds = sum(row["steady_seconds"] for row in measured)
    if seconds <= 0:
        return ()
    ranks = range(len(measured[0]["busy"]))
    return tuple(
        1 - sum(row["busy"][rank] * row["steady_seconds"] for row in measured) / seconds for rank in ranks
    )


def _peak_memory(segments: Sequence[Row]) -> tuple[float, ...]:
    """The largest of the segments, rank by rank; segments of earlier versions do not say it."""
    weighed = [row["memory"] for row in segments if row.get("memory")]
    of_ranks = [memory.get("device_peak") or memory["total"] for memory in weighed]
    return tuple(max(map(float, of_rank)) for of_rank in zip(*of_ranks, strict=True))
