"""Rehearses one rank of a run: the run's own build, warm-up, executor, updates, evaluation and checkpoint
with fake tensors, alone, with messages that arrive at once.

Not rehearsed: numbers, time, kernels, the transport itself, and what writes or reads files.
"""

from __future__ import annotations

import itertools
import re
import resource
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import UnsupportedFakeTensorException

from schedules import Program
from schedules.actions import Action
from stages.checkpoint.state import pack
from stages.checkpoint.tensors import HostCopies
from stages.comm.communicator import Communicator
from stages.comm.process import Process
from stages.comm.topology import Connection, connect
from stages.config.run_config import RunConfig, changed
from stages.config.segments import is_sharded, shards_of
from stages.data.dataset import Corpus
from stages.data.shards import Shard
from stages.memory.measure import tensors_in
from stages.model.compiler import is_compiled
from stages.model.runner import block_runner
from stages.pipeline.build import Rank, build_ranks
from stages.pipeline.evaluation import evaluate
from stages.pipeline.executor import drive
from stages.pipeline.warm_up import warm_up_ranks
from stages.rehearsal.fake_gpu import GPU, fake_tensors
from stages.rehearsal.watch import CPU, HERE, TORCH, Finding, Watch, shortened
from stages.resolve.facts import Resolved, facts
from stages.update.balance import BlockLoad, LoadTally
from stages.update.optimizer_step import STEPS_TO_FULL_STATE
from stages.weights.number_formats import dtypes

HOT = ("F", "B", "I", "W", "update")
"""Phases in which no host may wait for its device: it would not launch ahead, and other ranks wait for it."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What a rehearsal found of one rank."""

    rank: int
    data_rank: int
    stages: tuple[int, ...]
    device: str
    compiled: bool
    """Whether its blocks are compiled."""
    microbatches: int
    """Micro-batches that the rank performed."""
    findings: Counter[Finding]
    notes: tuple[str, ...]
    peak: Counter[str]
    """Bytes by kind when the sum was largest, from the first action to the last update. Where updates run
    beside actions, on a stream of their own, the temporaries of both."""
    peak_phase: str
    temporaries: Counter[str]
    """The most bytes of temporaries in each phase; of an `update`, in those after the optimizer's state was
    made."""
    kept: Counter[str]
    """Bytes by kind at the drain."""
    flops: Counter[str]
    """FLOPs by phase, as torch counts them: causal attention as the whole square."""
    seconds: float
    """Processor time that the rehearsal took on this machine."""
    process_bytes: int
    """The most that this process has had resident so far."""

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    @property
    def hot_waits(self) -> Counter[Finding]:
        """The host's waits for its device while it trains."""
        return Counter(
            {found: n for found, n in self.findings.items() if found.kind == "wait" and found.phase in HOT}
        )

    @property
    def faults(self) -> Counter[Finding]:
        """Findings that should be mended: all but waits outside of training."""
        others = {found: n for found, n in self.findings.items() if found.kind != "wait"}
        return self.hot_waits + Counter(others)


_TWO_DEVICES = re.compile("found (at least two|two different) devices")
"""In the errors of the versions of torch."""


def rehearse_rank(config: RunConfig, *, rank: int, data_rank: int, device: str) -> Rehearsal:
    """Perform one rank's part of a few steps with fake tensors.

    An error of the run's code ends it and is among the findings.

    Args:
        config: of the run.
        rank: in its pipeline.
        data_rank: of its pipeline.
        device: `cuda` or `cpu`: of the fake tensors. Needs no GPU and no torch built for one.
    """
    started = time.process_time()
    # The other micro-batches do the same.
    config = changed(config, {"train.eval_microbatches": config.parallel.data, "train.eval_tokens": None})
    tokens = config.train.microbatch_size * config.data.context
    watch = Watch(device, wide=config.train.precision == "float64", tokens=tokens)
    compiled = is_compiled(config, device=device)
    if compiled and config.data.document_mask:
        watch.note("compiled blocks: run as they stand, since attention within documents is not traced")
        compiled = False
    elif compiled:
        watch.note("compiled blocks: the compiler's graphs, one operator after another; attention is flash's")
    # The build would ask what this machine compiles with.
    config = changed(config, {"train.compile": False})
    run = facts(config)
    program = _program(run)
    part = _Part(run, watch, program=program, device=GPU if device == "cuda" else CPU, compiled=compiled)
    try:
        connection = part.connect(rank=rank, data_rank=data_rank)
        with fake_tensors(watch):
            part.perform(connection)
    except UnsupportedFakeTensorException as error:
        watch.note(f"{watch.phase}: torch has no fake form of what it does ({_first_line(error)})")
    except Exception as error:
        kind = "device" if _TWO_DEVICES.search(str(error)) else "error"
        where = _place(error)
        watch.found(kind, f"{type(error).__name__}: {_first_line(error)}", where=where)
    return Rehearsal(
        rank=rank,
        data_rank=data_rank,
        stages=tuple(stage for stage, holder in enumerate(program.rank_of_stage) if holder == rank),
        device=device,
        compiled=compiled,
        microbatches=program.microbatches * program.steps,
        findings=watch.findings,
        notes=tuple(watch.notes),
        peak=+watch.peak,
        peak_phase=watch.peak_phase,
        temporaries=part.temporaries,
        kept=+watch.bytes,
        flops=watch.flops,
        seconds=time.process_time() - started,
        process_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )


def _program(run: Resolved) -> Program:
    """The run's program of as few steps as have its memory and delay, and one after the optimizer's state is
    whole."""
    config = run.config
    ahead = 0 if run.schedule.synchronous else 2 * config.schedule.ahead * config.parallel.stages
    steps = max(1 + STEPS_TO_FULL_STATE, -(-ahead // config.schedule.microbatches) + 1)
    return run.program(first_step=run.sync_steps, steps=steps)


class _Part:
    """What one rank does."""

    def __init__(
        self, run: Resolved, watch: Watch, *, program: Program, device: torch.device, compiled: bool
    ) -> None:
        self._run = run
        self._config = run.config
        self._watch = watch
        self._program = program
        self._device = device
        self._compiled = compiled
        self._state_tensors: dict[int, int] = {}
        """Tensors of the optimizer's state by stage."""
        self.temporaries: Counter[str] = Counter()

    def connect(self, *, rank: int, data_rank: int) -> Connection:
        """The connection of one rank to others that are not there."""
        process = _Process(self._watch, self._config, rank=rank, data_rank=data_rank, device=self._device)
        return connect(
            cast(Process, process),
            self._program,
            shape=self._run.activation_shape,
            dtype=dtypes(self._config).replica,
            common_step=self._run.schedule.updates_together,
            shards=shards_of(self._config) if is_sharded(self._config) else None,
        )

    def perform(self, connection: Connection) -> None:
        config, watch, program = self._config, self._watch, self._program
        with tempfile.TemporaryDirectory() as folder:
            (built,) = build_ranks(
                self._run,
                connections=[connection],
                corpus=_corpus(config, Path(folder)),
                device=self._device,
                on_step=lambda result: None,
                stop=lambda: False,
            )
            if self._compiled:
                run_block = block_runner(
                    config.model,
                    recompute=config.train.recompute,
                    compiled=True,
                    sharded=connection.sharding is not None,
                )
                for state in built.stages.values():
                    for replica in state.weights.replicas:
                        replica.module.run_block = run_block
            self._label_weights(built)
            if self._device.type == "cuda":
                with watch.during("warm-up", leaves="other"):
                    warm_up_ranks([built], self._run, device=self._device)
            with watch.during("connect", leaves="other"):
                built.executor.connect()
            for state in built.stages.values():
                self._take_at_drain(state.update.tally)
                for replica, version in zip(state.weights.replicas, program.initial_versions, strict=False):
                    replica.version = version
            watch.begin_peak()
            built.executor.around = lambda action: self._around(built, action)
            with watch.during("update", leaves="other"):
                drive([built.executor.run(program)])
                built.connection.links.finish()
            self._label_state(built)
            peak = watch.peak, watch.peak_phase, watch.peak_total
            self.temporaries = Counter(watch.temporaries)
            if any(len(state.weights.gradients) > 1 for state in built.stages.values()):
                # One after the other here, and so never in memory at once.
                peak[0]["temporary"] += watch.temporaries.get("update", 0) if peak[1] != "update" else 0
            last = program.final_versions[-1]
            with watch.during("evaluation", leaves="other"):
                for averaged in (False, True)[: 1 + (self._config.train.ema_decay is not None)]:
                    drive([self._evaluation(built, version=last, averaged=averaged)])
                    built.connection.links.finish()
            with watch.during("checkpoint", leaves="other"):
                self._save(built)
            if watch.peak_total > peak[2]:
                watch.note(f"an evaluation takes more memory than training: {watch.peak_total / 1e9:.2f} GB")
            watch.peak, watch.peak_phase, _ = peak

    def _take_at_drain(self, tally: LoadTally) -> None:
        """The executor reads the tally after the last action, when the device is idle."""
        take = tally.take

        def take_at_drain() -> dict[int, BlockLoad]:
            with self._watch.during("drain", leaves="other"):
                return take()

        tally.take = take_at_drain  # type: ignore[method-assign]

    def _around(self, built: Rank, action: Action) -> AbstractContextManager[None]:
        self._label_state(built)
        return self._watch.during(action.op.value, leaves="activations")

    def _label_weights(self, built: Rank) -> None:
        for state in built.stages.values():
            weights, watch = state.weights, self._watch
            watch.label((part for r in weights.replicas for part in (r.flat, r.biases)), "weights")
            if weights.is_sharded:  # the shards are the master copy of what is updated in place
                watch.label(weights.replicas[0].parameters, "master")
            watch.label(weights.master.parameters, "master")
            watch.label(
                (part for g in weights.gradients for part in (g.flat, *g.owned_runs, g.loads)), "gradients"
            )
            if state.tied is not None:
                watch.label([state.tied.gradient], "gradients")
        self._watch.label_rest("other")

    def _label_state(self, built: Rank) -> None:
        """After an update, the optimizer and the correction may have more state."""
        for stage, state in built.stages.items():
            optimizer = state.update.optimizer
            if optimizer is None:
                continue
            held = [*tensors_in(list(optimizer.state.values()))]
            if len(held) == self._state_tensors.get(stage, 0):
                continue
            self._state_tensors[stage] = len(held)
            correction = [*tensors_in(state.update.correction.state_dict())]
            self._watch.label(correction, "correction")
            self._watch.label(held, "optimizer")
            # A first step makes the state; what is a temporary shows in later ones.
            self._watch.temporaries.pop("update", None)

    def _evaluation(self, built: Rank, *, version: int, averaged: bool) -> Iterator[None]:
        return cast(
            Iterator[None],
            evaluate(
                built.stages,
                self._program,
                connection=built.connection,
                batches=built.batches,
                version=version,
                dtype=dtypes(self._config).replica,
                on_action=lambda: None,
                averaged=averaged,
            ),
        )

    def _save(self, built: Rank) -> None:
        tensors: dict[str, Tensor] = {}
        for state in built.stages.values():
            tensors |= pack(state, self._program.final_versions)[0]
        HostCopies().take(tensors)


def _corpus(config: RunConfig, folder: Path) -> Corpus:
    """Zeros, a little longer than a sequence."""
    tokens = config.data.context + 2
    file = folder / "tokens"
    np.zeros(tokens, dtype=np.uint16).tofile(file)
    shard = Shard(file=file, dtype="uint16", tokens=tokens)
    return Corpus(
        train=(shard,),
        validation=(shard,),
        bytes_per_token=None,
        unigram_bits_per_byte=None,
        sha256="",
        end_of_document=0,
    )


class _Process:
    """The part of `stages.comm.process.Process` that a connection is made with."""

    def __init__(
        self, watch: Watch, config: RunConfig, *, rank: int, data_rank: int, device: torch.device
    ) -> None:
        data_ranks = config.parallel.data
        self.rank = rank * data_ranks + data_rank
        self.size = config.parallel.stages * data_ranks
        self.device = device
        self.device_waits = device.type == "cuda"
        self.generations = itertools.count()
        self._watch = watch

    def communicator(self, name: str, ranks: Sequence[int]) -> Communicator:
        return _Silent(self._watch)

    link = communicator


class _Silent:
    """A communicator whose operations are done at once and leave what they receive as it is."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._together: list[Tensor] | None = None
        """Received since `_start_coalescing`."""

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> _Done:
        self._watch.label(tensors, "messages")
        return _Done()

    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> _Done:
        self._watch.label(tensors, "messages")
        if self._together is not None:
            self._together += tensors
        return _Done(self._watch, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> _Done:
        return _Done()

    def _allgather_base(self, output: Tensor, given: Tensor, /) -> _Done:
        return _Done()

    def broadcast(self, tensor: Tensor, root: int, /) -> _Done:
        return _Done()

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list[int], given_sizes: list[int], /
    ) -> _Done:
        self._watch.label([output, given], "reduction")
        return _Done()

    def _start_coalescing(self) -> None:
        self._together = []

    def _end_coalescing(self) -> _Done:
        together, self._together = self._together, None
        return _Done(self._watch, together)


class _Done:
    """Work that is complete. What was received belongs to its stage once it has been waited for."""

    def __init__(self, watch: Watch | None = None, received: list[Tensor] | None = None) -> None:
        self._watch, self._received = watch, received

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        if self._watch is not None and self._received is not None:
            self._watch.label(self._received, "activations")


def _place(error: BaseException) -> str:
    """File and line of the innermost frame outside of torch and of this package."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((TORCH, HERE, "<")) and "contextlib" not in frame.filename
    ]
    return f"{shortened(frames[-1].filename)}:{frames[-1].lineno}" if frames else "unknown"


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
