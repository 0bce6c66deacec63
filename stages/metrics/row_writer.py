"""Writes a run's rows to the recorder, in the one process that knows the loss."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stages.checkpoint.files import FileEntry
from stages.config.run_config import RunConfig, tokens_per_step
from stages.data.dataset import Corpus
from stages.memory.measure import RankMemory, memory_fields
from stages.metrics import rows
from stages.pipeline.evaluation import ValidationLoss
from stages.pipeline.timeline import Meeting, timeline
from stages.update.rank_stats import RankTrace, StepResult


class Recorder(Protocol):
    """Receives a run's measurements. Only the rank of the last stage, which has the loss, calls it."""

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row to the run's metrics; its `kind` is start, step, eval, segment, pause or
        end."""

    def timeline(self, timeline: Mapping[str, Any]) -> None:
        """Replace the timeline: when the ranks performed the latest actions of a segment."""

    def flush(self) -> None:
        """Sync all rows to the disk; called before a checkpoint is completed."""

    def written(self) -> FileEntry | None:
        """Size and SHA-256 of all rows so far; None if they are kept nowhere."""

    def has_rows(self, step: int) -> bool:
        """Whether the rows that were written before the checkpoint of a step are still there."""

    def heartbeat(self, step: int, *, train_loss: float, tokens_per_second: float) -> None:
        """Report that the run makes progress, after `step` steps."""


HEARTBEAT_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What a rank reports of a segment to the process that writes the rows."""

    rank: int
    data_rank: int
    host: str
    trace: RankTrace
    met: Meeting
    """When it left the latest meeting before the segment."""
    memory: RankMemory


class Rows:
    """The rows of a run.

    Args:
        config: of the run.
        recorder: keeps the rows; None: another process writes.
        update_interval: micro-batches whose gradients one update applies.
        writer: rank and data rank of the writing process.
        replayed: whether one process performs all ranks, so that its times mean nothing.
    """

    def __init__(
        self,
        config: RunConfig,
        recorder: Recorder | None,
        *,
        update_interval: int,
        writer: tuple[int, int],
        replayed: bool,
    ) -> None:
        self._config = config
        self._recorder = recorder
        self._tokens_per_update = rows.tokens_per_update(config, update_interval=update_interval)
        self._writer = writer
        self._replayed = replayed
        self.train_losses: list[float] = []
        self.val_losses: list[float] = []
        self._heartbeat = (0, 0.0)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row, if this process writes."""
        if self._recorder is not None:
            self._recorder.append(row)

    def start(
        self,
        corpus: Corpus,
        *,
        step: int,
        updates: int,
        device: torch.device,
        stage_parameters: Sequence[int],
        rank_of_stage: Sequence[int],
        shared_gpu: bool,
        warm_up_seconds: float,
    ) -> None:
        """Write what is known when training begins, or resumes after `step` steps and `updates` updates."""
        self._heartbeat = (updates, time.perf_counter())
        self.write(
            rows.start_row(
                self._config,
                corpus,
                step=step,
                updates=updates,
                device=device,
                stage_parameters=stage_parameters,
                rank_of_stage=rank_of_stage,
                replayed=self._replayed,
                shared_gpu=shared_gpu,
                warm_up_seconds=warm_up_seconds,
            )
        )

    def step(self, result: StepResult, *, seconds: float) -> None:
        """Write an update of the last stage, after so many seconds of training."""
        self.train_losses.append(result.train_loss)
        tokens = result.version * self._tokens_per_update
        self.write(rows.step_row(result, tokens=tokens, seconds=seconds))
        version, then = self._heartbeat
        now = time.perf_counter()
        if self._recorder is not None and now - then >= HEARTBEAT_SECONDS:
            tokens = (result.version - version) * self._tokens_per_update
            done = result.version * self._tokens_per_update // tokens_per_step(self._config)
            self._recorder.heartbeat(
                done, train_loss=result.train_loss, tokens_per_second=tokens / (now - then)
            )
            self._heartbeat = (result.version, now)

    def segment(self, reports: Sequence[RankReport], *, first_step: int, steps: int, seconds: float) -> None:
        """Write what the ranks measured in a segment; `seconds` of training since the start of the run."""
        self.write(
            rows.segment_row(
                {(report.rank, report.data_rank): report.trace for report in reports},
                hosts={(report.rank, report.data_rank): report.host for report in reports},
                first_step=first_step,
                steps=steps,
                writer=self._writer,
                tokens_per_update=self._tokens_per_update,
                seconds=seconds,
                timed=not self._replayed,
                memory=memory_fields([report.memory for report in reports]),
            )
        )
        if self._recorder is None or self._replayed:
            return
        pipeline = [report for report in reports if report.data_rank == 0]
        self._recorder.timeline(
            timeline(
                {report.rank: report.trace for report in pipeline},
                {report.rank: report.met for report in pipeline},
                first_step=first_step,
                steps=steps,
                microbatches=self._config.schedule.microbatches,
            )
        )

    def evaluation(
        self,
        losses: Mapping[str, ValidationLoss],
        average: Mapping[str, ValidationLoss] | None,
        *,
        step: int,
        seconds: float,
    ) -> None:
        """Write the loss of each validation set after `step` steps, nats per token.

        Args:
            losses: of the weights.
            average: of their average, if the run has one.
            step: number of steps done.
            seconds: of training.
        """
        fields = {
            name: rows.loss_fields(loss, None if average is None else average[name])
            for name, loss in losses.items()
        }
        headline = self._config.data.headline
        self.val_losses.append(losses[headline].mean)
        tokens = step * tokens_per_step(self._config)
        sets = {"sets": fields} if self._config.data.validation else {}
        row = {"kind": "eval", "step": step, "tokens": tokens, **fields[headline], **sets}
        self.write({**row, "seconds": seconds})

    def end(self, digests: list[tuple[str, str]], *, seconds: float) -> None:
        """Write the end of the run, with the digest of each evaluation weight by name."""
        digest = rows.weights_digest(digests)
        step = self._config.train.steps
        self.write({"kind": "end", "step": step, "seconds": seconds, "weights_sha256": digest})

    def pause(self, *, step: int, seconds: float) -> None:
        """Write that the run pauses after `step` steps, evaluated and saved."""
        self.write({"kind": "pause", "step": step, "seconds": seconds})

    def written(self) -> FileEntry | None:
        """Size and SHA-256 of all rows so far, if this process writes."""
        return None if self._recorder is None else self._recorder.written()

    def flush(self) -> None:
        """Make sure that the rows are on the disk: no checkpoint is newer than the metrics."""
        if self._recorder is not None:
            self._recorder.flush()
