"""Computes the numbers of a run from its metrics rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncpp_cli.report.load.metrics_rows import Metrics
from stages.rows import Evaluation, Segment, SetLoss, Start

_LOSSES = ("val_loss", "val_loss_error", "val_loss_ema", "bits_per_byte")
"""Fields that a run for its speed alone does not have."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Numbers from the metrics of a run; None where they are not known (yet)."""

    steps_done: int = 0
    """Updates in the metrics."""
    evaluations: tuple[Evaluation, ...] = ()
    val_loss: float | None = None
    """Nats per token, of the last evaluation."""
    val_loss_error: float | None = None
    """Its standard error, from the losses of the evaluation's micro-batches."""
    val_loss_ema: float | None = None
    """The loss of the average of the weights there."""
    bits_per_byte: float | None = None
    """The loss of the last evaluation, in bits per byte of text."""
    unigram_bits_per_byte: float | None = None
    """Entropy of the single bytes of the text: the best loss of a model without context."""
    tokens_per_second: float | None = None
    """In steady state: without evaluations, and without filling and draining the pipeline."""
    tokens_per_second_by_segment: tuple[float, ...] = ()
    """Tokens per second of each segment, in steady state."""
    delay: int | None = None
    """Largest number of updates between the weights of a gradient and those it was applied to, as counted."""
    mismatch: int | None = None
    """Largest number of versions between a micro-batch's forward and its backward, as counted."""
    bubble: float | None = None
    """Share of the steady state that ranks waited, mean over ranks, in 0..1."""
    bubble_by_rank: tuple[float, ...] = ()
    slowest: Slowest | None = None
    """The rank that the others wait for, by what the ranks computed."""
    peak_memory: tuple[float, ...] = ()
    """Peak bytes of each rank of the pipeline: allocated on the device, or where the device does not count
    them, held by the run itself."""
    load_per_core: float | None = None
    """Largest load average per core of the machine, over the segments."""
    load_by_block: tuple[float, ...] = ()
    """In the last segment, for each block of experts: tokens of the busiest expert over the mean of all
    experts, in an update."""
    load_max_over_mean: float | None = None
    """The largest of these."""
    load_entropy: float | None = None
    """Entropy of the experts' shares of the last segment's tokens, 1 if equal; the least over blocks."""
    experts_never_chosen: int | None = None
    """In the last segment, over all blocks."""
    skipped_steps: int = 0
    """Steps skipped because a gradient was not finite."""
    skipped_last: int = 0
    """Steps skipped in a row at the end."""
    seconds: float | None = None
    """Training time, without evaluations."""
    first_step_seconds: float | None = None
    """Up to the first update: compiling, loading kernels, filling the pipeline."""
    start: Start | None = None
    """The `start` row of the last attempt: machine and versions."""
    segments: tuple[Segment, ...] = ()
    pauses: int = 0
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
    start = metrics.starts[-1] if metrics.starts else None
    segments = metrics.segments
    # By step: a run that is killed as it pauses evaluates again, to the same loss.
    evaluations = tuple({row.step: row for row in metrics.evaluations}.values())
    last = evaluations[-1] if evaluations else None
    bubble_by_rank = _bubble_by_rank(segments)
    steps = metrics.steps
    seconds = [row.seconds for row in metrics.evaluations]
    seconds += [row.seconds for row in segments]
    seconds += [row.seconds for row in metrics.ends if row.seconds is not None]
    if len(steps):
        seconds.append(float(steps["seconds"][-1]))
    return Measurement(
        steps_done=int(steps["step"].max() or 0) if len(steps) else 0,  # type: ignore[arg-type]
        evaluations=evaluations,
        val_loss=last.val_loss if last else None,
        val_loss_error=last.val_loss_error if last else None,
        val_loss_ema=last.val_loss_ema if last else None,
        bits_per_byte=_bits_per_byte(last.val_loss, start.bytes_per_token) if last and start else None,
        unigram_bits_per_byte=start.unigram_bits_per_byte if start else None,
        tokens_per_second=_tokens_per_second(segments),
        tokens_per_second_by_segment=tuple(
            row.steady_tokens / row.steady_seconds for row in segments if row.steady_seconds > 0
        ),
        delay=max((delay for row in segments for delay in row.delay_max if delay is not None), default=None),
        mismatch=max((mismatch for row in segments for mismatch in row.mismatch_max), default=None),
        bubble=sum(bubble_by_rank) / len(bubble_by_rank) if bubble_by_rank else None,
        bubble_by_rank=bubble_by_rank,
        slowest=slowest(segments, start),
        peak_memory=_peak_memory(segments),
        load_per_core=max(
            (row.load_per_core for row in segments if row.load_per_core is not None), default=None
        ),
        **_load(segments),
        skipped_steps=int(steps["skipped"].sum()) if len(steps) else 0,
        skipped_last=len(steps) - 1 - max((~steps["skipped"]).arg_true(), default=-1),
        seconds=max(seconds, default=None),
        first_step_seconds=_first_step_seconds(metrics),
        start=start,
        segments=tuple(segments),
        # By step, as evaluations.
        pauses=len({row.step for row in metrics.pauses}),
    )


def without_losses(measurement: Measurement) -> Measurement:
    """The numbers of a run for its speed alone, whose loss is that of another run."""
    unknown: dict[str, Any] = dict.fromkeys(_LOSSES)
    return replace(measurement, evaluations=(), **unknown)


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


def _load(segments: Sequence[Segment]) -> dict[str, Any]:
    """The fields of the experts' load; none in a dense model."""
    measured = [row.experts for row in segments if row.experts is not None]
    if not measured:
        return {}
    last = measured[-1]
    return {
        "load_by_block": tuple(last.max_over_mean),
        "load_max_over_mean": max(last.max_over_mean),
        "load_entropy": min(last.entropy),
        "experts_never_chosen": sum(last.never_chosen),
    }


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
