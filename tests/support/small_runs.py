"""Configurations small enough for a test, and ways to run them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from schedules import FAMILY
from stages.comm.process import Process, connected
from stages.comm.topology import Connection, connect_in_process
from stages.config.run_config import (
    DataConfig,
    ErrorFeedbackConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    changed,
)
from stages.config.segments import segment_program
from stages.data.dataset import prepare
from stages.pipeline.build import Rank, build_ranks
from stages.resolve.facts import facts
from stages.rows import Row
from stages.trainer import replay, train
from stages.training_loop import broadcast_initial_weights
from stages.weights.flat_buffers import GradientBuffer
from stages.weights.weight_versions import WeightVersions

_WORDS = "a pipeline of stages that never waits takes steps with old gradients and its loss goes down ."
TEXT = " ".join(random.Random(0).choices(_WORDS.split(), k=4000))
"""Fixed: tests of bfloat16 have margins, which must not move with an edit of some file."""
TEXT_FILE = "ASYNCPP_TEST_TEXT"
"""Environment variable: the file that holds it, where a fixture of `tests/stages` has written it."""


def small_config(
    schedule: str = "1f1b",
    *,
    text: Path | None = None,
    stages: int = 2,
    cut: Sequence[float] | None = None,
    data: int = 1,
    microbatches: int = 2,
    chunks: int | None = None,
    split: bool = False,
    update_interval: int | None = None,
    optimizer: str = "adamw",
    coefficient: float = 0.0,
    form: str = "look-ahead",
    family: str = "llama",
    layers: int | None = None,
    steps: int = 4,
    eval_interval: int = 3,
    precision: str = "float32",
    clip: str | None = None,
    clip_norm: float = 1.0,
    lr: float = 5e-3,
    seed: int = 0,
    delay: int = 1,
    ahead: int = 1,
    recompute: str = "none",
    compile: bool = False,
    shard_head: bool = False,
    tied: bool = False,
    ema_decay: float | None = None,
    vocab_size: int = 256,
    documents: bool = False,
    **settings: Any,
) -> RunConfig:
    """A run of a tiny model, with the settings that its schedule needs.

    Args:
        schedule: its name.
        text: trained on; without one, that of the tests of `stages`.
        chunks: two where the schedule takes any.
        family: of the decoder; or `tied`, `mup` or `experts` for a Llama with that.
        layers: as many as stages, and at least four.
        clip: by stage where stages update on their own, else globally.
        documents: attention within documents.
        settings: further settings by their dotted keys.
    """
    facts = FAMILY.get(schedule)
    if chunks is None:
        chunks = 2 if facts is not None and "chunks" in facts.options else 1
    per_rank = chunks * (1 if facts is None else facts.stages_per_rank)
    if clip is None:
        clip = "global" if facts is None or facts.updates_together else "stage"
    model = ModelConfig(
        name="tiny",
        layers=max(4, stages * per_rank) if layers is None else layers,
        width=16,
        heads=4,
        kv_heads=2,
        mlp_width=24,
        tied=tied or family == "tied",
        family="llama" if family in ("tied", "mup", "experts") else family,
        vocab_size=vocab_size,
    )
    config = RunConfig(
        schedule=ScheduleConfig(
            name=schedule,
            microbatches=microbatches,
            chunks=chunks,
            split=split,
            update_interval=update_interval,
            delay=delay,
            ahead=ahead,
        ),
        optimizer=OptimizerConfig(name=optimizer, lr=lr),
        error_feedback=ErrorFeedbackConfig(coefficient=coefficient, form=form),
        model=model,
        data=DataConfig(path=os.environ[TEXT_FILE] if text is None else str(text), context=12),
        parallel=ParallelConfig(
            stages=stages, cut=None if cut is None else tuple(cut), data=data, shard_head=shard_head
        ),
        train=TrainConfig(
            steps=steps,
            microbatch_size=3,
            eval_interval=eval_interval,
            eval_microbatches=2,
            clip=clip,
            clip_norm=clip_norm,
            precision=precision,
            recompute=recompute,
            compile=compile,
            ema_decay=ema_decay,
        ),
        seed=seed,
    )
    if documents:
        config = with_documents(config)
    if family == "experts":
        config = with_experts(config, shared_experts=1, dense_layers=1)
    if family == "mup":
        config = with_mup(config)
    return changed(config, settings)


def with_documents(config: RunConfig) -> RunConfig:
    """The same run with attention within documents, which end with a space: each word is one."""
    return replace(config, data=replace(config.data, document_mask=True, end_of_document=ord(" ")))


def with_experts(config: RunConfig, **further: Any) -> RunConfig:
    """The same run with a mixture of experts: 6 experts, of which a token meets 2."""
    settings = {"experts": 6, "active_experts": 2, "expert_width": 12} | further
    return replace(config, model=replace(config.model, **settings))


def with_mup(config: RunConfig) -> RunConfig:
    """The same run under mup, four times as wide as its base and twice as deep; initial matrices are so large
    that no gradient is tiny."""
    model = config.model
    base = {"base_width": model.width // 4, "base_layers": model.layers // 2, "base_head_dim": 2}
    base |= {"init_std": 0.5}
    return replace(config, model=replace(model, parametrization="mup", **base))


class Rows:
    """A recorder that keeps rows in memory."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.timelines: list[dict[str, Any]] = []

    def append(self, row: Row) -> None:
        self.rows.append(row.plain())

    def timeline(self, timeline: Mapping[str, Any]) -> None:
        self.timelines.append(dict(timeline))

    def flush(self) -> None:
        pass

    def written(self) -> None:
        return None

    def has_rows(self, step: int) -> bool:
        return True

    def heartbeat(self, step: int, *, train_loss: float, tokens_per_second: float) -> None:
        pass

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == kind]

    @property
    def memory(self) -> dict[str, list[int]]:
        """That of the last segment."""
        memory: dict[str, list[int]] = self.of_kind("segment")[-1]["memory"]
        return memory

    @property
    def digest(self) -> str:
        """Of the weights at the end."""
        return str(self.rows[-1]["weights_sha256"])


class Replayed(Rows):
    """A replay: its rows, and its result."""

    def __init__(self, config: RunConfig, **given: Any) -> None:
        super().__init__()
        self.result = replay(config, recorder=self, **given)


def replayed(config: RunConfig, **given: Any) -> Replayed:
    return Replayed(config, **given)


def trained_here(process: Process, config: RunConfig, **given: Any) -> Rows:
    """Train as one process of a run: the rows that it writes, on one rank of all."""
    rows = Rows()
    train(config, process=process, recorder=rows, **given)
    return rows


def in_processes(work: Callable[..., Any], arguments: Sequence[Any], *, size: int) -> list[list[Any]]:
    """Call `work(process, argument)` for each argument in `size` connected processes; results by rank."""
    # Forked from a server that has imported torch, and its compiler for runs that are compiled: that takes
    # longer than most runs here.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stages.trainer", "torch._dynamo"])
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(
                target=_work_through, args=(work, arguments, rank, size, folder, results, dict(os.environ))
            )
            for rank in range(size)
        ]
        for worker in workers:
            worker.start()
        try:
            by_rank = dict(results.get(timeout=240) for _ in workers)
        finally:
            for worker in workers:
                worker.join(timeout=20)
                worker.kill()
    failures = [outcome for outcome in by_rank.values() if isinstance(outcome, str)]
    assert not failures, "\n".join(failures)
    return [by_rank[rank] for rank in range(size)]


def _work_through(
    work: Callable[[Process, Any], Any],
    arguments: Sequence[Any],
    rank: int,
    size: int,
    folder: str,
    results: Any,
    environment: dict[str, str],
) -> None:
    import traceback

    import torch

    gc.freeze()  # the server's modules are no garbage
    # The server's environment is that of the first test that needed it.
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        site = RunConfig().site
        with connected(
            rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=Path(folder), site=site
        ) as process:
            results.put((rank, [work(process, argument) for argument in arguments]))
    except BaseException:
        results.put((rank, traceback.format_exc()))


def ranks_with(config: RunConfig, connections: list[Connection]) -> list[Rank]:
    """The ranks of a run on this machine's CPU, connected as given."""
    return build_ranks(
        facts(config),
        connections=connections,
        corpus=prepare(config.data),
        device=torch.device("cpu"),
        on_step=lambda result: None,
        stop=lambda: False,
    )


def ranks_of(config: RunConfig) -> list[Rank]:
    """All ranks of a run in this process, with their initial weights."""
    torch.set_num_threads(config.site.threads)
    placed = segment_program(config, first_step=0, steps=1).rank_of_stage
    connections = connect_in_process(rank_of_stage=placed, data_ranks=config.parallel.data)
    broadcast_initial_weights(ranks := ranks_with(config, connections), in_process=True)
    return ranks


FAILS_COMPILED_IN_FLOAT64 = version("torch").startswith("2.11.")
"""Its own compiled backward of attention, on a CPU: `expected scalar type Double but found Float`."""

compiles_float64 = pytest.mark.skipif(
    FAILS_COMPILED_IN_FLOAT64, reason="torch 2.11's own compiled attention fails in float64"
)


def spoil_gradients(
    patch: pytest.MonkeyPatch, *, when: Callable[[WeightVersions], bool], data_rank: int
) -> None:
    """Put a NaN into the gradient of the second block's stage on one data rank."""
    take = WeightVersions.take_gradient

    def spoiled(self: WeightVersions) -> GradientBuffer:
        gradient = take(self)
        chosen = self.owned == self.ownership.owned[data_rank] and "blocks.1.mlp_norm.weight" in self.names
        if chosen and when(self):
            gradient.views[-1].view(-1)[-1] = float("nan")
        return gradient

    patch.setattr(WeightVersions, "take_gradient", spoiled)


def newest_version(weights: WeightVersions) -> int:
    return max(replica.version for replica in weights.replicas)


class Operators(TorchDispatchMode):
    """Within its block, calls `note` after each operator."""

    def note(self, operator: Any, given: tuple[Any, ...], out: Any) -> None:
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.note(func, args, out)
        return out
