"""Writing the rows of a run's metrics: the one process does that knows the loss."""

from __future__ import annotations

import hashlib
import platform
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from stages.checkpoint.files import FileEntry
from stages.config.own_code import code_sha256, own_code
from stages.config.run_config import OWN_SPLIT, RunConfig, eval_microbatches, tokens_per_step
from stages.data.dataset import Corpus
from stages.data.documents import attention_share
from stages.data.shards import Tokens
from stages.memory.measure import RankMemory, memory_fields
from stages.model.compiler import compiles_here
from stages.pipeline.evaluation import ValidationLoss
from stages.pipeline.timeline import Meeting, timeline
from stages.rows import (
    End,
    Evaluation,
    Experts,
    Numbers,
    Pause,
    Row,
    Segment,
    SetLoss,
    Source,
    Start,
    Step,
    ValidationSet,
)
from stages.shape.families import describe
from stages.update.rank_stats import RankTrace, StageTrace, StepResult

_T = TypeVar("_T")


class Recorder(Protocol):
    """Receives a run's measurements. Only the rank of the last stage, which has the loss, calls it."""

    def append(self, row: Row) -> None:
        """Append a row to the run's metrics."""

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
        writer: rank and data rank of the writing process, whose clock is used.
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
        # Tokens whose gradient one update applies.
        self._tokens_per_update = tokens_per_step(config) * update_interval // config.schedule.microbatches
        self._writer = writer
        self._replayed = replayed
        self.train_losses: list[float] = []
        self.val_losses: list[float] = []
        self._heartbeat = (0, 0.0)

    def write(self, row: Row) -> None:
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
        """Write what is known when training begins, or resumes after `step` steps and `updates` updates.
        `warm_up_seconds`: before that, of this process."""
        self._heartbeat = (updates, time.perf_counter())
        config, headline = self._config, corpus.held_out(self._config.data.headline)
        self.write(
            Start(
                step=step,
                updates=updates,
                time=time.time(),
                torch=str(torch.__version__),
                python=platform.python_version(),
                host=socket.gethostname(),
                device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
                threads=config.site.threads,
                replayed=self._replayed,
                shared_gpu=shared_gpu,
                compiled=compiles_here(config, device=device.type),
                warm_up_seconds=warm_up_seconds,
                parameters=sum(stage_parameters),
                active_parameters=sum(stage_parameters) - describe(config.model).idle_count,
                stage_parameters=list(stage_parameters),
                rank_of_stage=list(rank_of_stage),
                microbatches=config.schedule.microbatches,
                microbatch_size=config.train.microbatch_size,
                context=config.data.context,
                tokens_per_step=tokens_per_step(config),
                bytes_per_token=headline.bytes_per_token,
                unigram_bits_per_byte=headline.unigram_bits_per_byte,
                corpus_sha256=corpus.sha256,
                sources=_sources(corpus),
                validation=_validation_sets(config, corpus),
                attention_share=attention_share(corpus, context=config.data.context)
                if config.data.document_mask
                else None,
                code_sha256={section: code_sha256(files) for section, files in own_code(config).items()},
            )
        )

    def step(self, result: StepResult, *, seconds: float) -> None:
        """Write an update of the last stage, after so many seconds of training."""
        self.train_losses.append(result.train_loss)
        tokens = result.version * self._tokens_per_update
        self.write(step_row(result, tokens=tokens, seconds=seconds))
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
        traces = {(report.rank, report.data_rank): report.trace for report in reports}
        hosts = {(report.rank, report.data_rank): report.host for report in reports}
        by_stage = [merged for _, merged in sorted(_merged_over_data_ranks(traces.values()).items())]
        periods = max(0, len(traces[self._writer].update_times) - 1)
        timed = not self._replayed
        self.write(
            Segment(
                first_step=first_step,
                steps=steps,
                steady_tokens=periods * self._tokens_per_update if timed else 0,
                steady_seconds=traces[self._writer].steady_seconds if timed else 0.0,
                busy=_mean_busy(traces) if timed else [],
                action_seconds=_action_seconds(by_stage) if timed else {},
                compute_seconds=_by_rank(
                    {at: trace.compute_seconds for at, trace in traces.items()} if timed else {}
                ),
                hosts=_by_rank(hosts) if len(set(hosts.values())) > 1 else None,
                delay_min=[trace.delay_min for trace in by_stage],
                delay_max=[trace.delay_max for trace in by_stage],
                mismatch_max=[trace.mismatch_max for trace in by_stage],
                memory=memory_fields([report.memory for report in reports]),
                experts=_loads(traces.values()),
                seconds=seconds,
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
        of_sets = {
            name: SetLoss(
                val_loss=loss.mean,
                val_loss_error=loss.error,
                val_loss_ema=None if average is None else average[name].mean,
            )
            for name, loss in losses.items()
        }
        headline = of_sets[self._config.data.headline]
        self.val_losses.append(headline.val_loss)
        self.write(
            Evaluation(
                step=step,
                tokens=step * tokens_per_step(self._config),
                val_loss=headline.val_loss,
                val_loss_error=headline.val_loss_error,
                val_loss_ema=headline.val_loss_ema,
                sets=of_sets if self._config.data.validation else None,
                seconds=seconds,
            )
        )

    def end(self, digests: list[tuple[str, str]], *, seconds: float) -> None:
        """Write the end of the run, with the digest of each evaluation weight by name."""
        steps = self._config.train.steps
        self.write(End(step=steps, seconds=seconds, weights_sha256=weights_digest(digests)))

    def pause(self, *, step: int, seconds: float) -> None:
        """Write that the run pauses after `step` steps, evaluated and saved."""
        self.write(Pause(step=step, seconds=seconds))

    def written(self) -> FileEntry | None:
        """Size and SHA-256 of all rows so far, if this process writes."""
        return None if self._recorder is None else self._recorder.written()

    def flush(self) -> None:
        """Make sure that the rows are on the disk: no checkpoint is newer than the metrics."""
        if self._recorder is not None:
            self._recorder.flush()


def step_row(result: StepResult, *, tokens: int, seconds: float) -> Step:
    """The row of an update; `tokens` and `seconds` count from the start of the run."""
    return Step(
        step=result.version,
        tokens=tokens,
        train_loss=result.train_loss,
        lr=result.update.lr,
        grad_norm=result.update.grad_norm,
        skipped=result.update.skipped,
        seconds=seconds,
    )


def _sources(corpus: Corpus) -> dict[str, Source] | None:
    """The shares of a mixture."""
    return {each.name: Source(share=each.share, tokens=each.tokens) for each in corpus.sources} or None


def _validation_sets(config: RunConfig, corpus: Corpus) -> dict[str, ValidationSet] | None:
    """What is evaluated of each validation set, if there are several."""
    described = {}
    for name in (OWN_SPLIT, *corpus.sets) if corpus.sets else ():
        held_out = corpus.held_out(name)
        tokens = len(Tokens(held_out.shards))
        sequences = config.train.microbatch_size * eval_microbatches(config, name, tokens=tokens)
        described[name] = ValidationSet(
            tokens=tokens,
            evaluated_tokens=sequences * config.data.context,
            bytes_per_token=held_out.bytes_per_token,
            unigram_bits_per_byte=held_out.unigram_bits_per_byte,
            sha256=held_out.sha256,
        )
    return described or None


def _loads(traces: Iterable[RankTrace]) -> Experts | None:
    """The loads of the blocks of experts; None in a dense model."""
    by_block = sorted({block: load for trace in traces for block, load in trace.loads.items()}.items())
    if not by_block:
        return None
    loads = [load for _, load in by_block]
    return Experts(
        blocks=[block for block, _ in by_block],
        max_over_mean=[load.max_over_mean for load in loads],
        entropy=[load.entropy for load in loads],
        never_chosen=[load.never_chosen for load in loads],
    )


def _action_seconds(by_stage: Sequence[StageTrace]) -> dict[str, Numbers]:
    """Mean seconds of each op at each stage."""
    ops = sorted({op for trace in by_stage for op in trace.actions})
    means: dict[str, Numbers] = {op.value: [] for op in ops}
    for trace in by_stage:
        for op in ops:
            count, seconds = trace.actions.get(op, (0, 0.0))
            means[op.value].append(seconds / count if count else None)
    return means


def _by_rank(values: Mapping[tuple[int, int], _T]) -> list[list[_T]]:
    """For each rank of the pipeline, the values of its data ranks."""
    by_rank: dict[int, list[_T]] = {}
    for (rank, _), value in sorted(values.items(), key=lambda item: item[0]):
        by_rank.setdefault(rank, []).append(value)
    return list(by_rank.values())


def _mean_busy(traces: Mapping[tuple[int, int], RankTrace]) -> list[float | None]:
    """Busy share of each rank of the pipeline, the mean over data ranks."""
    means: list[float | None] = []
    for shares in _by_rank({at: trace.busy for at, trace in traces.items()}):
        known = [share for share in shares if share is not None]
        means.append(sum(known) / len(known) if known else None)
    return means


def _merged_over_data_ranks(traces: Iterable[RankTrace]) -> dict[int, StageTrace]:
    """Measurements of each stage, summed over its data ranks. Their delays equal the program's, so those of
    one data rank are used."""
    merged: dict[int, StageTrace] = {}
    for stage, trace in ((stage, trace) for rank in traces for stage, trace in rank.stages.items()):
        into = merged.setdefault(stage, StageTrace(trace.delay_min, trace.delay_max, trace.mismatch_max))
        for op, (count, seconds) in trace.actions.items():
            before, so_far = into.actions.get(op, (0, 0.0))
            into.actions[op] = (before + count, so_far + seconds)
    return merged


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def weights_digest(digests: Iterable[tuple[str, str]]) -> str:
    """SHA-256 over all parameters, from each one's name and digest; the same for every cut."""
    digest_of_all = hashlib.sha256()
    for name, digest in sorted(digests):
        digest_of_all.update(f"{name}:{digest}\n".encode())
    return digest_of_all.hexdigest()
