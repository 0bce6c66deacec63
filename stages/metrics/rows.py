"""The rows of a run's metrics; docs/run-folder.md describes their fields."""

from __future__ import annotations

import hashlib
import platform
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from stages.config.own_code import code_sha256, own_code
from stages.config.run_config import OWN_SPLIT, RunConfig, eval_microbatches, tokens_per_step
from stages.data.dataset import Corpus
from stages.data.documents import attention_share
from stages.data.shards import Tokens
from stages.model.compiler import compiles_here
from stages.pipeline.evaluation import ValidationLoss
from stages.shape.families import describe
from stages.update.balance import BlockLoad
from stages.update.rank_stats import RankTrace, StageTrace, StepResult

Row = dict[str, Any]
_T = TypeVar("_T")


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
    rank_of_stage: Sequence[int],
    replayed: bool,
    shared_gpu: bool,
    warm_up_seconds: float,
) -> Row:
    """The row written when training begins, or resumes after `step` steps and `updates` updates.
    `warm_up_seconds`: before that, of this process."""
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
        "compiled": compiles_here(config, device=device.type),
        "warm_up_seconds": warm_up_seconds,
        "parameters": sum(stage_parameters),
        "active_parameters": sum(stage_parameters) - describe(config.model).idle_count,
        "stage_parameters": list(stage_parameters),
        "rank_of_stage": list(rank_of_stage),
        "microbatches": config.schedule.microbatches,
        "microbatch_size": config.train.microbatch_size,
        "context": config.data.context,
        "tokens_per_step": tokens_per_step(config),
        "bytes_per_token": corpus.held_out(config.data.headline).bytes_per_token,
        "unigram_bits_per_byte": corpus.held_out(config.data.headline).unigram_bits_per_byte,
        "corpus_sha256": corpus.sha256,
        **_sources(corpus),
        **_validation_sets(config, corpus),
        **_attention(config, corpus),
        "code_sha256": {section: code_sha256(files) for section, files in own_code(config).items()},
    }


def _sources(corpus: Corpus) -> Row:
    """The shares of a mixture."""
    described = {each.name: {"share": each.share, "tokens": each.tokens} for each in corpus.sources}
    return {"sources": described} if described else {}


def _validation_sets(config: RunConfig, corpus: Corpus) -> Row:
    """What is evaluated of each validation set, if there are several."""
    if not corpus.sets:
        return {}
    described = {}
    for name in (OWN_SPLIT, *corpus.sets):
        held_out = corpus.held_out(name)
        tokens = len(Tokens(held_out.shards))
        sequences = config.train.microbatch_size * eval_microbatches(config, name, tokens=tokens)
        described[name] = {
            "tokens": tokens,
            "evaluated_tokens": sequences * config.data.context,
            "bytes_per_token": held_out.bytes_per_token,
            "unigram_bits_per_byte": held_out.unigram_bits_per_byte,
            "sha256": held_out.sha256,
        }
    return {"validation": described}


def _attention(config: RunConfig, corpus: Corpus) -> Row:
    if not config.data.document_mask:
        return {}
    return {"attention_share": attention_share(corpus, context=config.data.context)}


def step_row(result: StepResult, *, tokens: int, seconds: float) -> Row:
    """The row of an update; `tokens` and `seconds` count from the start of the run."""
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


def loss_fields(loss: ValidationLoss, average: ValidationLoss | None) -> Row:
    """The fields of a validation set's loss, and of that of the average of the weights."""
    fields = {"val_loss": loss.mean, "val_loss_error": loss.error}
    return fields if average is None else {**fields, "val_loss_ema": average.mean}


def segment_row(
    traces: Mapping[tuple[int, int], RankTrace],
    *,
    hosts: Mapping[tuple[int, int], str],
    first_step: int,
    steps: int,
    writer: tuple[int, int],
    tokens_per_update: int,
    seconds: float,
    timed: bool,
    memory: Row,
) -> Row:
    """The row of a segment: what the ranks measured from one drain to the next.

    Args:
        traces: by rank of the pipeline and data rank.
        hosts: of these ranks.
        first_step: of the segment.
        steps: of the segment.
        writer: the rank whose clock is used.
        tokens_per_update: tokens whose gradient one update applies.
        seconds: of training since the start of the run.
        timed: whether times are meaningful, as they are not in a replay.
        memory: fields of `stages.memory.measure`.
    """
    by_stage = [merged for _, merged in sorted(_merged_over_data_ranks(traces.values()).items())]
    periods = max(0, len(traces[writer].update_times) - 1)
    return {
        "kind": "segment",
        "first_step": first_step,
        "steps": steps,
        "steady_tokens": periods * tokens_per_update if timed else 0,
        "steady_seconds": traces[writer].steady_seconds if timed else 0.0,
        "busy": _mean_busy(traces) if timed else [],
        "action_seconds": _action_seconds(by_stage) if timed else {},
        "compute_seconds": _by_rank(
            {at: trace.compute_seconds for at, trace in traces.items()} if timed else {}
        ),
        **({"hosts": _by_rank(hosts)} if len(set(hosts.values())) > 1 else {}),
        "delay_min": [trace.delay_min for trace in by_stage],
        "delay_max": [trace.delay_max for trace in by_stage],
        "mismatch_max": [trace.mismatch_max for trace in by_stage],
        "memory": memory,
        **_loads(traces.values()),
        "seconds": seconds,
    }


def _loads(traces: Iterable[RankTrace]) -> Row:
    """The loads of the blocks of experts, as lists by block; nothing in a dense model."""
    by_block = sorted({block: load for trace in traces for block, load in trace.loads.items()}.items())
    names = [field.name for field in fields(BlockLoad)]
    measures = {name: [getattr(load, name) for _, load in by_block] for name in names}
    return {"experts": {"blocks": [block for block, _ in by_block], **measures}} if by_block else {}


def _action_seconds(by_stage: Sequence[StageTrace]) -> dict[str, list[float | None]]:
    """Mean seconds of each op at each stage."""
    ops = sorted({op for trace in by_stage for op in trace.actions})
    means: dict[str, list[float | None]] = {op.value: [] for op in ops}
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
