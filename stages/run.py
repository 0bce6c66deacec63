"""One run: segment after segment of its program; at drains evaluations and checkpoints."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from schedules import Program, analyze
from stages import record
from stages.assemble import build_ranks, dtypes, representative_programs, segment_lengths
from stages.authenticated import Json
from stages.checkpoint import Checkpoints, Progress
from stages.config import RunConfig, tokens_per_step
from stages.connection import Connection
from stages.corpus import prepare
from stages.evaluate import evaluate, evaluation_weights, forward_program
from stages.initial_weights import read_initial
from stages.metrics import Recorder
from stages.plain import from_json, to_json
from stages.process import Process
from stages.programs import segment_program
from stages.rows import Rows
from stages.timeline import Meeting, timeline
from stages.trace import RankTrace, StepResult, check_staleness
from stages.turns import drive
from stages.update import StageState
from stages.warm_up import warm_up
from stages.watchdog import Doing
from stages.weigh import RankMemory, Weigher, memory_fields


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run leaves in memory, of the stages that this process holds."""

    weights: dict[str, Tensor]
    """Evaluation weights by parameter name."""
    train_losses: list[float]
    """Of each update; empty where the last stage of data rank 0 is elsewhere."""
    val_losses: list[float]
    """Of each evaluation; likewise."""
    stopped_at: int | None
    """Step after which the run ended because a rank was told to; None: it is complete."""


@dataclass(frozen=True, kw_only=True)
class OfRank:
    """What the process that writes the rows hears of a rank at a drain."""

    rank: int
    data_rank: int
    trace: RankTrace
    met: Meeting
    """How it left the latest meeting before the segment."""
    memory: RankMemory


class SkippedTooOftenError(RuntimeError):
    """Step after step was left out since a gradient was not finite."""


class Run:
    """One run, as the process that has these `connections` sees it; `process` is None where that is all of
    them."""

    def __init__(
        self,
        config: RunConfig,
        *,
        connections: Sequence[Connection],
        device: torch.device,
        process: Process | None,
        recorder: Recorder,
        checkpoints: Path | None,
        text_folder: Path | None,
        stop: Callable[[], bool],
        doing: Doing,
    ) -> None:
        torch.set_num_threads(config.site.threads)
        program = representative_programs(config)[0]
        self._doing = doing
        self._begin("reading the data", with_disk=True)
        self._config = config
        self._device = device
        self._process = process
        self._rank_of_stage = program.rank_of_stage
        self._corpus = prepare(config.data, spare=text_folder)
        doing.begin("building the model", kind="building")
        self._ranks = build_ranks(
            config,
            connections=connections,
            corpus=self._corpus,
            device=device,
            on_step=self._on_step,
            stop=self._is_to_end,
        )
        doing.acted_at = lambda: max(rank.executor.acted_at for rank in self._ranks)
        self._weigher = Weigher(config, rank_of_stage=program.rank_of_stage, device=device)
        self._stop = stop
        self._checkpoints: Checkpoints | None = None
        if checkpoints is not None:
            self._checkpoints = Checkpoints(
                checkpoints,
                keep=config.site.keep_checkpoints,
                process=process,
                timeout=config.site.save_timeout,
            )
        self._writer = (program.rank_of_stage[-1], 0)
        self._writing_process = program.rank_of_stage[-1] * config.parallel.data
        here = {(rank.number, rank.connection.data.rank) for rank in self._ranks}
        self._rows = Rows(
            recorder if self._writer in here else None,
            tokens_per_update=record.tokens_per_update(config, update_interval=program.update_interval),
        )
        self._seconds = 0.0
        self._segment_started = 0.0
        self._val_losses: list[float] = []
        self._met = Meeting(host=socket.gethostname(), left=time.perf_counter())

    def _begin(self, doing: str, *, with_disk: bool = False) -> None:
        self._doing.begin(doing, kind="disk" if with_disk else "start" if doing == "starting" else "")

    def run(self) -> RunResult:
        start = Progress(step=0, seconds=0.0)
        if self._checkpoints is not None:
            self._begin("going on from a checkpoint", with_disk=True)
            start = self._checkpoints.load(
                self._stages(), lambda step: self._program(step, 1).initial_versions
            )
        if start.step == 0 and self._config.model.init is not None:
            self._begin("reading the initial weights", with_disk=True)
            for state in self._stages():
                state.weights.start_from(read_initial(self._config.model, state.weights.names))
        self._begin("starting")
        if self._process is not None and self._device.type == "cuda":
            for state in self._stages():
                warm_up(state, self._config, device=self._device)
        self._seconds = start.seconds
        first_program = self._program(start.step, 1)
        updates = start.step * first_program.microbatches // first_program.update_interval
        self._rows.begin(updates=updates)
        sizes = [
            (stage, sum(parameter.numel() for parameter in state.weights.replicas[0].parameters))
            for rank in self._ranks
            for stage, state in rank.stages.items()
        ]
        # The ranks that were built fast wait here for the others.
        collected = self._at_writer(sizes, starting=True)
        if self._process is not None:
            for rank in self._ranks:
                rank.executor.connect()
        if collected is not None:
            stage_sizes = dict(from_json(list[tuple[int, int]], collected))
            self._rows.write(
                record.start_row(
                    self._config,
                    self._corpus,
                    step=start.step,
                    updates=updates,
                    device=self._device,
                    stage_parameters=[size for _, size in sorted(stage_sizes.items())],
                    replayed=self._process is None,
                    shared_gpu=self._process is not None and self._process.through_host,
                )
            )
        stopped_at = None
        for first_step, steps in segment_lengths(self._config, start=start.step):
            done, stopping = self._train_segment(first_step, steps)
            last = done == self._config.train.steps
            if done % self._config.train.eval_interval == 0 or last:
                self._evaluate(done)
            interval = self._config.train.checkpoint_interval
            if stopping or last or (interval and done % interval == 0):
                self._save(done)
            if stopping and not last:
                stopped_at = done
                break
        if self._checkpoints is not None:
            self._begin("writing a checkpoint", with_disk=True)
            self._checkpoints.finish()
        self._begin("ending")
        weights = {
            name: tensor
            for rank in self._ranks
            for state in rank.stages.values()
            for name, tensor in evaluation_weights(state, dtype=dtypes(self._config).master).items()
        }
        if stopped_at is None:
            self._write_end(weights)
        return RunResult(
            weights=weights,
            train_losses=self._rows.train_losses,
            val_losses=self._val_losses,
            stopped_at=stopped_at,
        )

    def _write_end(self, weights: Mapping[str, Tensor]) -> None:
        digests = self._at_writer([(name, record.tensor_digest(tensor)) for name, tensor in weights.items()])
        if digests is None:
            return
        self._rows.write(
            {
                "kind": "end",
                "step": self._config.train.steps,
                "seconds": self._seconds,
                "weights_sha256": record.weights_digest(from_json(list[tuple[str, str]], digests)),
            }
        )

    def _program(self, first_step: int, steps: int) -> Program:
        return segment_program(self._config, first_step=first_step, steps=steps)

    def _stages(self) -> list[StageState]:
        return [state for rank in self._ranks for state in rank.stages.values()]

    def _save(self, step: int) -> None:
        if self._checkpoints is None:
            return
        self._begin("writing a checkpoint", with_disk=True)
        self._checkpoints.save(
            Progress(step=step, seconds=self._seconds),
            self._stages(),
            self._program(step, 1).initial_versions,
            first=self._rows.flush,
        )

    def _is_to_end(self) -> bool:
        return self._stop() or self._saving_failed

    @property
    def _saving_failed(self) -> bool:
        return self._checkpoints is not None and self._checkpoints.failed

    def _train_segment(self, first_step: int, steps: int) -> tuple[int, bool]:
        """Train to the next drain. Steps done then, and whether the run is to end there."""
        program = self._program(first_step, steps)
        self._begin("training")
        self._weigher.begin()
        met = self._met
        self._segment_started = time.perf_counter()
        drive([rank.executor.run(program) for rank in self._ranks])
        self._finish_sending()
        self._begin("meeting the other ranks at a drain")
        self._seconds += time.perf_counter() - self._segment_started
        done = self._ranks[0].executor.end_step
        if done < first_step + steps:
            steps_done, program = done - first_step, self._program(first_step, done - first_step)
        else:
            steps_done = steps
        # None says no, for everybody hears the first that is something else.
        gave_up, failed, stop, wrong = self._first(
            next((rank.executor.trace.gave_up for rank in self._ranks if rank.executor.trace.gave_up), None),
            self._saving_failed or None,
            self._stop() or None,
            self._staleness(program),
        )
        if self._checkpoints is not None and (gave_up or failed):
            self._begin("writing a checkpoint", with_disk=True)
            self._checkpoints.finish()
        if gave_up:
            raise SkippedTooOftenError(gave_up)
        if wrong:
            raise RuntimeError(wrong)
        collected = self._at_writer(
            [
                OfRank(
                    rank=rank.number,
                    data_rank=rank.connection.data.rank,
                    trace=rank.executor.trace,
                    met=met,
                    memory=self._weigher.weigh(rank),
                )
                for rank in self._ranks
            ]
        )
        if collected is not None:
            self._write_segment(from_json(list[OfRank], collected), first_step=first_step, steps=steps_done)
        return done, done < first_step + steps or bool(stop)

    def _staleness(self, program: Program) -> str | None:
        """What differs between what the ranks of this process measured and the program."""
        try:
            check_staleness([rank.executor.trace for rank in self._ranks], analyze(program))
        except RuntimeError as error:
            return str(error)
        return None

    def _write_segment(self, of_ranks: Sequence[OfRank], *, first_step: int, steps: int) -> None:
        self._rows.write(
            record.segment_row(
                {(one.rank, one.data_rank): one.trace for one in of_ranks},
                first_step=first_step,
                steps=steps,
                writer=self._writer,
                tokens_per_update=self._rows.tokens_per_update,
                seconds=self._seconds,
                timed=self._process is not None,
                memory=memory_fields([one.memory for one in of_ranks]),
            )
        )
        if self._process is not None:
            self._rows.timeline(
                timeline(
                    {one.rank: one.trace for one in of_ranks if one.data_rank == 0},
                    {one.rank: one.met for one in of_ranks if one.data_rank == 0},
                    first_step=first_step,
                    steps=steps,
                )
            )

    def _evaluate(self, step: int) -> None:
        dtype = dtypes(self._config).replica
        parts = []
        for rank in self._ranks:
            program = forward_program(
                rank_of_stage=self._rank_of_stage,
                microbatches=self._config.train.eval_microbatches,
                version=step,
                data_rank=rank.connection.data.rank,
                data_ranks=rank.connection.data.size,
            )
            parts.append(
                evaluate(
                    program,
                    connection=rank.connection,
                    stages=rank.stages,
                    batches=rank.batches,
                    dtype=dtype,
                    on_action=lambda: self._begin("evaluating"),
                )
            )
        losses = drive(parts)
        self._finish_sending()
        for rank, loss in zip(self._ranks, losses, strict=True):
            if loss is not None and rank.connection.data.rank == 0:
                self._val_losses.append(loss)
                tokens = step * tokens_per_step(self._config)
                self._rows.write(
                    {
                        "kind": "eval",
                        "step": step,
                        "tokens": tokens,
                        "val_loss": loss,
                        "seconds": self._seconds,
                    }
                )

    def _finish_sending(self) -> None:
        for rank in self._ranks:
            rank.connection.links.finish()

    def _on_step(self, result: StepResult) -> None:
        """Called at each update of the last stage, in the process that holds that of data rank 0."""
        self._rows.step(result, seconds=self._seconds + result.time - self._segment_started)

    def _first(self, *mine: Json) -> list[Json]:
        """Of each of several values, that of the first rank for which it is not None. All ranks meet."""
        if self._process is None:
            return list(mine)
        first = self._process.meetings.first(*mine)
        self._met = Meeting(host=self._met.host, left=time.perf_counter())
        return first

    def _at_writer(self, mine: Sequence[object], *, starting: bool = False) -> list[Json] | None:
        """What the processes brought, as JSON, in the one that writes the run's rows; None in the others. All
        ranks meet.

        Args:
            mine: what this process brings.
            starting: whether others may still be starting.
        """
        if self._process is None:
            return [to_json(item) for item in mine]
        seconds = self._process.start_timeout.total_seconds() if starting else None
        everyone = self._process.meetings.gather(
            [to_json(item) for item in mine], to=self._writing_process, seconds=seconds
        )
        self._met = Meeting(host=self._met.host, left=time.perf_counter())
        return [item for of_process in everyone for item in of_process] if everyone else None
