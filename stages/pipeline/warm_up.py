"""Warms up a stage: its first micro-batch and step, before ranks wait for each other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from schedules import Op
from stages.data.batches import whole_sequences
from stages.model.decoder import Stage
from stages.model.gradients.split_backward import DeferredGradients, add_matrix, deferring
from stages.model.head_shard import HeadShard, merge_parts
from stages.pipeline.build import Rank
from stages.resolve.facts import Resolved
from stages.update.optimizer_step import StageState
from stages.weights.number_formats import dtypes


def warm_up_ranks(ranks: Sequence[Rank], run: Resolved, *, device: torch.device) -> float:
    """Warm up all stages of these ranks, for the backwards, whole and split, that the run performs of them.

    Returns:
        The seconds it took; most of them are for compiling.
    """
    started = time.perf_counter()
    config, programs = run.config, run.programs
    for rank in ranks:
        ops = {action.op for program in programs for action in program.actions[rank.number]}
        for state in rank.stages.values():
            if Op.BACKWARD in ops:
                warm_up(state, run, split=False, device=device)
            if Op.BACKWARD_WEIGHT in ops:
                warm_up(state, run, split=True, device=device)
        if config.train.cuda_graphs:
            # Before the rehearsal: capturing gives back all memory that torch keeps, pinned memory too.
            rank.executor.capture(programs, shape=run.activation_shape, dtype=dtypes(config).replica)
        rank.executor.rehearse(programs)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def warm_up(state: StageState, run: Resolved, *, split: bool, device: torch.device) -> None:
    """Perform a forward and a backward (`split`: in two halves), and discard their effects.

    A receive that is posted ahead occupies a GPU until its message arrives. One-time work of a first
    micro-batch or step (compiling, loading kernels, allocating) may wait for an idle device, while the
    message waits for that work. So it is done before any receive is posted, on all ranks at once.
    """
    module = state.weights.newest().module
    if isinstance(module.head, HeadShard):
        _warm_up_shard(state, module.head, run, device=device)
        return
    config, shape = run.config, run.activation_shape
    tokens = torch.zeros(shape[:2], dtype=torch.long, device=device)
    activation = torch.zeros(shape, dtype=dtypes(config).replica, device=device).requires_grad_()
    documents = whole_sequences(*shape[:2], device=device) if config.data.document_mask else None
    deferred = DeferredGradients() if split else None
    with leaving_no_trace(module, device), torch.enable_grad(), deferring(deferred):
        given = tokens if module.embedding is not None else activation
        targets = tokens if module.head is not None else None
        output = module(given, targets=targets, documents=documents)
        output.sum().backward()
    if deferred is not None:
        deferred.compute()
    state.weights.gradient_buffer.flat.zero_()
    if state.tied is not None:
        state.tied.clear()


def _warm_up_shard(state: StageState, shard: HeadShard, run: Resolved, *, device: torch.device) -> None:
    """Perform S and T, and if it is tied E and G, of a micro-batch (`stages.model.head_shard`)."""
    config = run.config
    hidden = torch.zeros(run.activation_shape, dtype=dtypes(config).replica, device=device)
    tokens = torch.zeros(hidden.shape[:2], dtype=torch.long, device=device)
    part, kept = shard.run(hidden, tokens)
    assert kept is not None
    merged = merge_parts([part] * config.parallel.stages, scale=1.0)
    factors, given = shard.gradient_factors(kept, merged.sums, scale=1.0)
    gradients = DeferredGradients()
    add_matrix(gradients, shard.weight, given=given, gradient=factors)
    if config.model.tied:
        shard.leave_embedded(gradients, tokens, shard.embed(tokens))
    gradients.compute()
    state.weights.gradient_buffer.flat.zero_()


@contextmanager
def leaving_no_trace(module: Stage, device: torch.device) -> Iterator[None]:
    """Restore the buffers and the random state, which a forward of a user's own model may change."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    for buffer, before in buffers:
        buffer.copy_(before)
