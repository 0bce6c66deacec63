"""Computes the numbers of a run from its metrics rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import takewhile
from typing import Any, TypeVar

from asyncpp_cli.report.load.metrics_rows import Metrics
from stages.rows import Evaluation, Segment, SetLoss, Start

_Number = TypeVar("_Number")
_Ordered = TypeVar("_Ordered", int, float)


def _by_step(rows: Metrics) -> list[Evaluation]:
    """One evaluation of each step: a run that is killed as it pauses evaluates again, to the same loss."""
    return list({row.step: row for row in rows.evaluations}.values())


def _last(rows: Metrics, name: str) -> float | None:
    """A field of the last evaluation."""
    return getattr(_by_step(rows)[-1], name) if rows.evaluations else None


def _started(rows: Metrics, name: str) -> float | None:
    """A field of the last `start` row."""
    return getattr(rows.start, name, None)


def _most(values: Iterable[_Ordered | None]) -> _Ordered | None:
    """The largest that is not None; None without any."""
    return max((value for value in values if value is not None), default=None)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _load(rows: Metrics, name: str) -> Sequence[Any]:
    """A field of the experts' load in the last segment that has it, by block; empty in a dense model."""
    measured = [row.experts for row in rows.segments if row.experts is not None]
    return getattr(measured[-1], name) if measured else ()


def _bits_per_byte(loss: float | None, bytes_per_token: float | None) -> float | None:
    """A loss in nats per token as bits per byte of text; None if either is unknown."""
    return loss / math.log(2) / bytes_per_token if loss is not None and bytes_per_token else None


def _first_step_seconds(metrics: Metrics) -> float | None:
    first = [row for row in metrics.starts if row.step == 0]
    if not first or not len(metrics.steps) or first[-1].replayed:
        return None
    return (first[-1].warm_up_seconds or 0.0) + float(metrics.steps["seconds"][0])


def _tokens_per_second(segments: Sequence[Segment]) -> float | None:
    seconds = sum(row.steady_seconds for row in segments)
    return sum(row.steady_tokens for row in segments) / seconds if seconds > 0 else None


def _bubble_by_rank(segments: Sequence[Segment]) -> tuple[float, ...]:
    """For each rank, the share of the steady state that it waited; segments are weighted by their length."""
    measured = [
        ([share for share in row.busy if share is not None], row.steady_seconds)
        for row in segments
        if row.steady_seconds > 0 and row.busy and None not in row.busy
    ]
    seconds = sum(took for _, took in measured)
    if seconds <= 0:
        return ()
    ranks = range(len(measured[0][0]))
    return tuple(1 - sum(busy[rank] * took for busy, took in measured) / seconds for rank in ranks)


def peak_memory(row: Segment) -> list[int]:
    """The peak bytes of a segment, by rank; empty if they were not measured."""
    memory = row.memory or {}
    return memory.get("device_peak") or memory.get("total", [])


def _peak_memory(segments: Sequence[Segment]) -> tuple[float, ...]:
    """The peak over the segments, by rank."""
    by_segment = [peak_memory(row) for row in segments if row.memory]
    return tuple(max(map(float, by_rank)) for by_rank in zip(*by_segment, strict=True))


@dataclass(frozen=True, kw_only=True)
class Slowest:
    """Where others wait."""

    rank: int
    """Rank of the pipeline that computes longest for a micro-batch, mean over its data ranks."""
    ratio: float
    """Its seconds over the mean of all ranks."""
    peer: tuple[int, int] | None
    """Rank and data rank of the process that takes longest, compared with the other data ranks of its rank;
    None: there is one data rank."""
    peer_ratio: float | None
    """Its seconds over the mean of those others."""
    host: str | None
    """Its machine; without data ranks that of `rank`."""


def slowest(segments: Sequence[Segment], start: Start | None) -> Slowest | None:
    """From the measured times of a run's segments; None where there are none, or one rank alone."""
    measured = [row for row in segments if row.compute_seconds]
    if not measured:
        return None
    steps = sum(row.steps for row in measured)
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
    hosts = measured[-1].hosts
    host = hosts[at_rank][at_data_rank] if hosts else start.host if start is not None else None
    return Slowest(
        rank=rank,
        ratio=by_rank[rank] / mean,
        peer=peer,
        peer_ratio=peers[peer] if peer else None,
        host=host,
    )


def _in_all_steps(row: Segment) -> list[list[float]]:
    return [[row.steps * (took or 0.0) for took in of_rank] for of_rank in row.compute_seconds or ()]


_NO_ROWS = Metrics()


def _of(formula: Callable[[Metrics], _Number]) -> _Number:
    """A field of `Measurement` by its formula; its default is that of a run without rows."""
    return field(default=formula(_NO_ROWS), metadata={"formula": formula})


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Numbers from the metrics of a run, each with its formula; None where they are not known (yet)."""

    start: Start | None = _of(lambda rows: rows.start)  # noqa: RUF009 - a row is frozen
    """The `start` row of the last attempt: machine and versions."""
    segments: tuple[Segment, ...] = _of(lambda rows: tuple(rows.segments))
    evaluations: tuple[Evaluation, ...] = _of(lambda rows: tuple(_by_step(rows)))
    steps_done: int = _of(lambda rows: int(rows.steps["step"].max() or 0))  # type: ignore[arg-type]
    """Updates in the metrics."""
    val_loss: float | None = _of(lambda rows: _last(rows, "val_loss"))
    """Nats per token, of the last evaluation."""
    val_loss_error: float | None = _of(lambda rows: _last(rows, "val_loss_error"))
    """Its standard error, from the losses of the evaluation's micro-batches."""
    val_loss_ema: float | None = _of(lambda rows: _last(rows, "val_loss_ema"))
    """The loss of the average of the weights there."""
    bits_per_byte: float | None = _of(
        lambda rows: _bits_per_byte(_last(rows, "val_loss"), _started(rows, "bytes_per_token"))
    )
    """The loss of the last evaluation, in bits per byte of text."""
    unigram_bits_per_byte: float | None = _of(lambda rows: _started(rows, "unigram_bits_per_byte"))
    """Entropy of the single bytes of the text: the best loss of a model without context."""
    tokens_per_second: float | None = _of(lambda rows: _tokens_per_second(rows.segments))
    """In steady state: without evaluations, and without filling and draining the pipeline."""
    tokens_per_second_by_segment: tuple[float, ...] = _of(
        lambda rows: tuple(rate for row in rows.segments if (rate := row.tokens_per_second) is not None)
    )
    """Tokens per second of each segment, in steady state."""
    delay: int | None = _of(lambda rows: _most(delay for row in rows.segments for delay in row.delay_max))
    """Largest number of updates between the weights of a gradient and those it was applied to, as counted."""
    mismatch: int | None = _of(
        lambda rows: _most(mismatch for row in rows.segments for mismatch in row.mismatch_max)
    )
    """Largest number of versions between a micro-batch's forward and its backward, as counted."""
    bubble: float | None = _of(lambda rows: _mean(_bubble_by_rank(rows.segments)))
    """Share of the steady state that ranks waited, mean over ranks, in 0..1."""
    bubble_by_rank: tuple[float, ...] = _of(lambda rows: _bubble_by_rank(rows.segments))
    slowest: Slowest | None = _of(lambda rows: slowest(rows.segments, rows.start))  # noqa: RUF009
    """The rank that the others wait for, by what the ranks computed."""
    peak_memory: tuple[float, ...] = _of(lambda rows: _peak_memory(rows.segments))
    """Peak bytes of each rank of the pipeline: allocated on the device, or where the device does not count
    them, held by the run itself."""
    load_per_core: float | None = _of(lambda rows: _most(row.load_per_core for row in rows.segments))
    """Largest load average per core of the machine, over the segments."""
    load_by_block: tuple[float, ...] = _of(lambda rows: tuple(_load(rows, "max_over_mean")))
    """In the last segment, for each block of experts: tokens of the busiest expert over the mean of all
    experts, in an update."""
    load_max_over_mean: float | None = _of(lambda rows: _most(_load(rows, "max_over_mean")))
    """The largest of these."""
    load_entropy: float | None = _of(lambda rows: min(_load(rows, "entropy"), default=None))
    """Entropy of the experts' shares of the last segment's tokens, 1 if equal; the least over blocks."""
    experts_never_chosen: int | None = _of(
        lambda rows: sum(chosen) if (chosen := _load(rows, "never_chosen")) else None
    )
    """In the last segment, over all blocks."""
    skipped_steps: int = _of(lambda rows: int(rows.steps["skipped"].sum()))
    """Steps skipped because a gradient was not finite."""
    skipped_last: int = _of(lambda rows: len([*takewhile(bool, reversed(rows.steps["skipped"].to_list()))]))
    """Steps skipped in a row at the end."""
    first_step_seconds: float | None = _of(lambda rows: _first_step_seconds(rows))
    """Up to the first update: compiling, loading kernels, filling the pipeline."""
    pauses: int = _of(lambda rows: len({row.step for row in rows.pauses}))
    """Steps at which the run has paused (`asyncpp launch --until`)."""

    @property
    def sets(self) -> Mapping[str, SetLoss]:
        """Losses of the last evaluation by validation set; empty if there is one set alone."""
        return (self.evaluations[-1].sets if self.evaluations else None) or {}

    def of_set(self, name: str, field: str) -> float | None:
        """A field of `SetLoss`, or the bits per byte, of a validation set; None if it is not known."""
        loss: float | None = getattr(
            self.sets.get(name), "val_loss" if field == "bits_per_byte" else field, None
        )
        if field != "bits_per_byte":
            return loss
        described = ((self.start.validation if self.start is not None else None) or {}).get(name)
        return _bits_per_byte(loss, None if described is None else described.bytes_per_token)

    @property
    def replayed(self) -> bool:
        """Whether one process ran all ranks in turn: its times say nothing about a pipeline."""
        return bool(self.start is not None and self.start.replayed)

    def first_at(self, target: float) -> Evaluation | None:
        """The first evaluation with a validation loss of at most `target`, nats per token."""
        return next((evaluation for evaluation in self.evaluations if evaluation.val_loss <= target), None)


def measure(metrics: Metrics) -> Measurement:
    """The numbers of a run.

    Raises:
        IndexError or ValueError: lists of a row have other lengths than those of another.
    """
    return Measurement(**{each.name: each.metadata["formula"](metrics) for each in fields(Measurement)})
