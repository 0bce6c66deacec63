"""The rows that a run writes about itself (docs/run-folder.md says what each field is)."""

from __future__ import annotations

import hashlib
import platform
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stages.config import RunConfig, tokens_per_step
from stages.corpus import Corpus
from stages.trace import RankTrace, StageTrace, StepResult

Row = dict[str, Any]


def tokens_per_update(config: RunConfig, *, update_interval: int) -> int:
    """Tokens whose gradient one update applies."""
    return tokens_per_step(config) * update_interval // config.schedule.microbatches


def start_row(
    config: RunConfig,
    corpus: Corpus,
    *,
    step: int,
    updates: int,
    device: torch.device,
    stage_parameters: Sequence[int],
    replayed: bool,
    shared_gpu: bool,
) -> Row:
    """What is known when training begins, or goes on after `step` steps and `updates` updates."""
    return {
        "kind": "start",
        "step": step,
        "updates": updates,
        "time": time.time(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": config.site.threads,
        "replayed": replayed,
        "shared_gpu": shared_gpu,
        "parameters": sum(stage_parameters),
        "stage_parameters": list(stage_parameters),
        "microbatches": config.schedule.microbatches,
        "microbatch_size": config.train.microbatch_size,
        "context": config.data.context,
        "tokens_per_step": tokens_per_step(config),
        "bytes_per_token": corpus.bytes_per_token,
        "unigram_bits_per_byte": corpus.unigram_bits_per_byte,
        "corpus_sha256": corpus.sha256,
    }


def step_row(result: StepResult, *, tokens: int, seconds: float) -> Row:
    """One update; `tokens` and `seconds` since the start of the run."""
    return {
        "kind": "step",
        "step": result.version,
        "tokens": tokens,
        "train_loss": result.train_loss,
        "lr": result.update.lr,
        "grad_norm": result.update.grad_norm,
        "skipped": result.update.skipped,
        "seconds": seconds,
    }


def segment_row(
    traces: Mapping[tuple[int, int], RankTrace],
    *,
    first_step: int,
    steps: int,
    writer: tuple[int, int],
    tokens_per_update: int,
    seconds: float,
    timed: bool,
    memory: Row,
) -> Row:
    """What the ranks measured from one drain to the next.

    Args:
        traces: by rank of the pipeline and data rank.
        first_step: of the segment.
        steps: of the segment.
        writer: the rank whose clock counts.
        tokens_per_update: tokens whose gradient one update applies.
        seconds: of training since the start of the run.
        timed: whether the run's times mean something; not where ranks take turns in one process.
        memory: what `stages.weigh` found.
    """
    of_stage = [merged for _, merged in sorted(_merged_over_data_ranks(traces.values()).items())]
    periods = max(0, len(traces[writer].update_times) - 1)
    return {
        "kind": "segment",
        "first_step": first_step,
        "steps": steps,
        "steady_tokens": periods * tokens_per_update if timed else 0,
        "steady_seconds": traces[writer].steady_seconds if timed else 0.0,
        "busy": _mean_busy(traces) if timed else [],
        "action_seconds": _action_seconds(of_stage) if timed else {},
        "delay_min": [trace.delay_min for trace in of_stage],
        "delay_max": [trace.delay_max for trace in of_stage],
        "mismatch_max": [trace.mismatch_max for trace in of_stage],
        "memory": memory,
        "seconds": seconds,
    }


def _action_seconds(of_stage: Sequence[StageTrace]) -> dict[str, list[float | None]]:
    """For each op, its mean seconds at each stage."""
    ops = sorted({op for trace in of_stage for op in trace.actions})
    means: dict[str, list[float | None]] = {op.value: [] for op in ops}
    for trace in of_stage:
        for op in ops:
            count, seconds = trace.actions.get(op, (0, 0.0))
            means[op.value].append(seconds / count if count else None)
    return means


def _mean_busy(traces: Mapping[tuple[int, int], RankTrace]) -> list[float | None]:
    """Of each rank of the pipeline, the mean over data ranks."""
    by_rank: dict[int, list[float | None]] = {}
    for (rank, _), trace in sorted(traces.items()):
        by_rank.setdefault(rank, []).append(trace.busy)
    means: list[float | None] = []
    for shares in by_rank.values():
        known = [share for share in shares if share is not None]
        means.append(sum(known) / len(known) if known else None)
    return means


def _merged_over_data_ranks(traces: Iterable[RankTrace]) -> dict[int, StageTrace]:
    """By stage, what its data ranks measured together. Their delays have been held against the program, so
    those of any one serve."""
    merged: dict[int, StageTrace] = {}
    for stage, trace in ((stage, trace) for of_rank in traces for stage, trace in of_rank.stages.items()):
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
    together = hashlib.sha256()
    for name, digest in sorted(digests):
        together.update(f"{name}:{digest}\n".encode())
    return together.hexdigest()
