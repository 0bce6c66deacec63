"""Trains a run segment by segment; at drains it evaluates and saves checkpoints."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Required, TypedDict

import msgspec
import torch
from torch import Tensor

from schedules import Program, analyze
from stages.checkpoint.files import Owner
from stages.checkpoint.initial_weights import read_initial
from stages.checkpoint.manager import Checkpoints, Progress
from stages.comm.device_settings import check_precision
from stages.comm.process import Process
from stages.comm.rendezvous.authenticated import Json
from stages.comm.topology import Connection
from stages.config.run_config import ModelConfig, SiteConfig
from stages.config.segments import places_of
from stages.data.dataset import prepare
from stages.data.shards import DataError, ShardWatch
from stages.liveness.stop_signal import never
from stages.liveness.watchdog import ActivityTracker
from stages.memory.measure import MemoryMeter
from stages.metrics import RankReport, Recorder, Rows, tensor_digest
from stages.model.compiler import compiles_here
from stages.pipeline.build import Rank, build_ranks
from stages.pipeline.evaluation import ValidationLoss, evaluate, weights_and_biases
from stages.pipeline.executor import drive
from stages.pipeline.timeline import Meeting
from stages.pipeline.torch_profile import StepProfiler
from stages.pipeline.warm_up import warm_up_ranks
from stages.resolve.facts import Resolved
from stages.shape.head import whole_name
from stages.update.rank_stats import StepResult, staleness_problem
from stages.weights.number_formats import dtypes


class DrainMeetings:
    """The meetings of one process with all others: once when the run starts, and at every drain.

    Args:
        process: of this rank; None: there is one process, which meets nobody.
        writing_process: number of the process that writes the run's rows.
    """

    def __init__(self, process: Process | None, *, writing_process: int) -> None:
        self._process = process
        self._writing_process = writing_process
        self.latest = Meeting(host=socket.gethostname(), left=time.perf_counter())
        """When this process left the latest meeting."""

    def first(self, *values: Json) -> list[Json]:
        """For each of several values, the first process's that is not None. All processes meet."""
        if self._process is None:
            return list(values)
        first = self._process.meetings.first(*values)
        self._leave()
        return first

    def at_writer(self, items: Sequence[object], *, starting: bool = False) -> list[Json] | None:
        """The items of all processes, as JSON with text for keys, in the process that writes rows; None
        elsewhere. All meet.

        Args:
            items: of this process.
            starting: whether others may still be starting.
        """
        # Processes exchange data and no pickles. A deque, which msgspec does not know, is sent as a list.
        content = [msgspec.to_builtins(item, str_keys=True, enc_hook=list) for item in items]
        if self._process is None:
            return content
        seconds = self._process.start_timeout.total_seconds() if starting else None
        everyone = self._process.meetings.gather(content, to=self._writing_process, seconds=seconds)
        self._leave()
        return [item for of_process in everyone for item in of_process] if everyone else None

    def _leave(self) -> None:
        self.latest = Meeting(host=self.latest.host, left=time.perf_counter())


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a run leaves in memory, for the stages that this process holds."""

    weights: dict[str, Tensor]
    """Evaluation weights and balance biases by name."""
    train_losses: list[float]
    """One per update; empty where the last stage of data rank 0 is in another process."""
    val_losses: list[float]
    """One per evaluation; likewise."""
    stopped_at: int | None
    """Step after which the run ended because a stop was requested; None: it is complete, or paused."""


class SkippedTooOftenError(RuntimeError):
    """The gradient was not finite in too many steps in a row."""


class Kept(TypedDict, total=False):
    """What a run is given to keep its measurements and checkpoints, and to stop by."""

    recorder: Required[Recorder]
    """Keeps the measurements."""
    checkpoints: Path | None
    """Folder to resume from and save into; None: start anew and save nothing."""
    continues_from: int
    """Step of the oldest checkpoint that it may start from; 0: also from the beginning."""
    owners: Sequence[Owner]
    """The run, and others whose checkpoints it may start from; empty: any that fits."""
    until: int | None
    """Step after which it evaluates, saves and pauses; None: it trains to the end."""
    text_folder: Path | None
    """Where text is split if the user's cache folder is not writable."""
    stop: Callable[[], bool]
    """Whether a stop has been requested. If any process returns true, all stop after the same step, and
    save."""


def _checkpoints(site: SiteConfig, process: Process | None, kept: Kept) -> Checkpoints | None:
    """The checkpoints that a run starts from and saves; None: it starts anew and saves nothing."""
    folder = kept.get("checkpoints")
    if folder is None:
        return None
    return Checkpoints(
        folder,
        keep=site.keep_checkpoints,
        process=process,
        timeout=site.save_timeout,
        oldest=kept.get("continues_from", 0),
        owners=kept.get("owners", ()),
        has_rows=kept["recorder"].has_rows,
    )


class TrainingLoop:
    """Trains ranks of a run in this process.

    Args:
        run: to train.
        connections: of the ranks that this process performs: all of the run if `process` is None.
        device: computes everything.
        process: this one; None: there is no other.
        doing: told what this process does, for those who watch it.
        kept: what the run is given to keep its measurements and checkpoints, and to stop by.
        profile_file: where `train.profile_steps` are profiled to; None: nowhere.
    """

    def __init__(
        self,
        run: Resolved,
        *,
        connections: Sequence[Connection],
        device: torch.device,
        process: Process | None,
        doing: ActivityTracker,
        kept: Kept,
        profile_file: Path | None = None,
    ) -> None:
        config = run.config
        check_precision(device, config.train.precision)
        torch.set_num_threads(config.site.threads)
        program = run.programs[0]
        self._doing = doing
        doing.begin("reading the data", kind="disk")
        self._run = run
        self._config = config
        until = kept.get("until")
        self._end = config.train.steps if until is None else min(until, config.train.steps)
        self._device = device
        self._process = process
        self._any_program = program
        self._corpus = prepare(config.data, spare=kept.get("text_folder"))
        self._data: ShardWatch | None = None
        if process is None or process.local_rank == 0:  # each machine sees its own
            self._data = ShardWatch(self._corpus.shards())
        doing.begin("building the model", kind="start")
        self._ranks = build_ranks(
            run,
            connections=connections,
            corpus=self._corpus,
            device=device,
            on_step=self._on_step,
            stop=self._stop_requested,
        )
        self._stages = [state for rank in self._ranks for state in rank.stages.values()]
        doing.acted_at = lambda: max(rank.executor.acted_at for rank in self._ranks)
        doing.waiting = lambda: next(filter(None, (rank.executor.waiting() for rank in self._ranks)), None)
        self._memory_meter = MemoryMeter(config, device=device)
        self._stop = kept.get("stop", never)
        self._checkpoints = _checkpoints(config.site, process, kept)
        writer = (program.rank_of_stage[program.loss_stage], 0)
        self._meetings = DrainMeetings(process, writing_process=places_of(config).process(*writer))
        writes = writer in {(rank.number, rank.connection.data.rank) for rank in self._ranks}
        self._rows = Rows(
            config,
            kept["recorder"] if writes else None,
            update_interval=program.update_interval,
            writer=writer,
            replayed=process is None,
        )
        self._profiler: StepProfiler | None = None
        if profile_file is not None and config.train.profile_steps:
            self._profiler = StepProfiler(profile_file, steps=config.train.profile_steps, device=device)
            for rank in self._ranks:
                rank.executor.around = self._profiler.around
        self._seconds = 0.0
        """Seconds of training since the start of the run."""
        self._segment_started = 0.0

    def run(self) -> TrainingResult:
        """Train from the newest checkpoint, or from the start, to the end, to a pause or to a requested stop.

        Raises:
            RuntimeError: a measured delay is not the program's.
            SkippedTooOftenError: no gradient was finite for `train.max_skipped` updates.
            DataError: the data has changed since the run began to read it.
        """
        start = self._load()
        self._start(start)
        config, done, stopped_at = self._config.train, start.step, None
        if self._end <= done < config.steps:
            # Killed between saving and ending, or stopped beyond this step: maybe not evaluated here.
            self._evaluate(done)
        for first_step, steps in self._run.segments(start=start.step, end=self._end):
            done, stopping = self._train_segment(first_step, steps)
            last = done == self._end
            if done % config.eval_interval == 0 or last:
                self._evaluate(done)
            if stopping or last or (config.checkpoint_interval and done % config.checkpoint_interval == 0):
                self._save(done)
            if stopping and not last:
                stopped_at = done
                break
        self._finish_saving()
        self._doing.begin("ending")
        weights = {
            name: tensor
            for state in self._stages
            for name, tensor in state.weights.whole(
                weights_and_biases(state, dtype=dtypes(self._config).master)
            ).items()
        }
        if self._data is not None and (changed := self._data.change()):
            raise DataError(changed)
        if stopped_at is None and done == config.steps:
            self._write_end(weights)
        elif stopped_at is None:
            self._rows.pause(step=done, seconds=self._seconds)
        return TrainingResult(
            weights=weights,
            train_losses=self._rows.train_losses,
            val_losses=self._rows.val_losses,
            stopped_at=stopped_at,
        )

    def _load(self) -> Progress:
        """Load the newest valid checkpoint, or the initial weights."""
        start = Progress(step=0, seconds=0.0)
        if self._checkpoints is not None:
            self._doing.begin("going on from a checkpoint", kind="disk")
            start = self._checkpoints.load(self._stages, lambda step: self._program(step, 1).initial_versions)
        if start.step == 0 and self._config.model.init is not None:
            self._doing.begin("reading the initial weights", kind="disk")
            read_initial_weights(self._ranks, self._config.model, process=self._process)
        return start

    def _start(self, start: Progress) -> None:
        """Wait for all ranks, connect them, and write the first row."""
        self._doing.begin("starting", kind="start")
        warmed_up = 0.0
        if self._warms_up():
            warmed_up = warm_up_ranks(self._ranks, self._run, device=self._device)
        self._seconds = start.seconds
        program = self._program(start.step, 1)
        updates = start.step * program.microbatches // program.update_interval
        sizes = [
            (stage, sum(state.weights.sizes)) for rank in self._ranks for stage, state in rank.stages.items()
        ]
        # Ranks that were built fast wait here for the others.
        collected = self._meetings.at_writer(sizes, starting=True)
        if self._process is not None:
            for rank in self._ranks:
                rank.executor.connect()
        if start.step == 0:
            broadcast_initial_weights(self._ranks, in_process=self._process is None)
        if collected is None:
            return
        stage_sizes = sorted(dict(msgspec.convert(collected, list[tuple[int, int]])).items())
        self._rows.start(
            self._corpus,
            step=start.step,
            updates=updates,
            device=self._device,
            stage_parameters=[size for _, size in stage_sizes],
            rank_of_stage=self._any_program.rank_of_stage,
            shared_gpu=self._process is not None and self._process.host_staged,
            warm_up_seconds=warmed_up,
        )

    def _warms_up(self) -> bool:
        """Whether a first micro-batch may take longer than a message or an action may: on a GPU, where blocks
        are compiled, and in a module of the user's own, whose first forward may build what it needs."""
        config, kind = self._config, self._device.type
        if config.train.cuda_graphs or config.model.factory is not None:
            return True
        return (kind == "cuda" and self._process is not None) or compiles_here(config, device=kind)

    def _train_segment(self, first_step: int, steps: int) -> tuple[int, bool]:
        """Train to the next drain. Returns the steps done by then, and whether the run ends there."""
        met = self._meetings.latest
        self._perform(self._program(first_step, steps), first_step)
        done = self._ranks[0].executor.end_step  # fewer if a stop was requested or the run gave up
        trained = self._program(first_step, done - first_step)
        stopping = self._agree_at_drain(trained, done)
        self._report_segment(first_step, done - first_step, met=met)
        return done, stopping or done < first_step + steps

    def _perform(self, program: Program, first_step: int) -> None:
        """Perform the program of a segment that begins at `first_step`, and add its time to the run's."""
        self._doing.begin("training")
        self._memory_meter.begin()
        if self._profiler is not None:
            self._profiler.begin(first_step=first_step, microbatches=program.microbatches)
        self._segment_started = time.perf_counter()
        drive([rank.executor.run(program) for rank in self._ranks])
        self._finish_sending()
        self._doing.begin("meeting the other ranks at a drain")
        self._seconds += time.perf_counter() - self._segment_started
        if self._profiler is not None:
            self._doing.begin("writing a profile", kind="disk")
            self._profiler.drained()
            self._doing.begin("meeting the other ranks at a drain")

    def _agree_at_drain(self, trained: Program, done: int) -> bool:
        """Meet all other processes; returns whether one of them is told to stop.

        Args:
            trained: the program that was performed.
            done: steps of the run done by now.

        Raises:
            RuntimeError: a measured delay is not the program's.
            SkippedTooOftenError: no gradient was finite for `train.max_skipped` updates.
            DataError: the data has changed since the run began to read it.
            CheckpointError: a checkpoint could not be written.
        """
        traces = [rank.executor.trace for rank in self._ranks]
        # None stands for no: everybody receives the first value that is something else.
        not_finite, gave_up, saving_failed, stop, wrong_delay, changed = self._meetings.first(
            next((trace.not_finite for trace in traces if trace.not_finite), None),
            next((trace.gave_up for trace in traces if trace.gave_up), None),
            self._saving_failed or None,
            self._stop() or None,
            staleness_problem(traces, analyze(trained)),
            None if self._data is None else self._data.change(thorough=done == self._end),
        )
        if gave_up or saving_failed or changed:
            self._finish_saving()
        if gave_up:
            raise SkippedTooOftenError(f"{not_finite}, so {gave_up}" if not_finite else gave_up)
        if wrong_delay:
            raise RuntimeError(wrong_delay)
        if changed:
            raise DataError(str(changed))
        return bool(stop)

    def _report_segment(self, first_step: int, steps: int, *, met: Meeting) -> None:
        """Write what all ranks measured in a segment, in the process that writes rows.

        Args:
            first_step: of the segment.
            steps: of the segment.
            met: when this process left the meeting before the segment.
        """
        collected = self._meetings.at_writer(
            [
                RankReport(
                    rank=rank.number,
                    data_rank=rank.connection.data.rank,
                    host=socket.gethostname(),
                    trace=rank.executor.trace,
                    met=met,
                    memory=self._memory_meter.measure(rank),
                )
                for rank in self._ranks
            ]
        )
        if collected is not None:
            reports = msgspec.convert(collected, list[RankReport], str_keys=True)
            self._rows.segment(reports, first_step=first_step, steps=steps, seconds=self._seconds)

    def _evaluate(self, step: int) -> None:
        weights = self._losses(step)
        average = None
        if self._config.train.ema_decay is not None:
            average = self._losses(step, averaged=True)
        if weights is not None:
            self._rows.evaluation(weights, average, step=step, seconds=self._seconds)

    def _losses(self, step: int, *, averaged: bool = False) -> dict[str, ValidationLoss] | None:
        """The losses of the weights or of their average, if this process has those of data rank 0."""
        parts = [
            evaluate(
                rank.stages,
                self._any_program,
                connection=rank.connection,
                batches=rank.batches,
                version=step,
                dtype=dtypes(self._config).replica,
                on_action=lambda: self._doing.begin("evaluating"),
                averaged=averaged,
            )
            for rank in self._ranks
        ]
        measured: list[dict[str, ValidationLoss] | None] = drive(parts)
        for state in self._stages:
            state.weights.hide()
        self._finish_sending()
        for rank, losses in zip(self._ranks, measured, strict=True):
            if losses is not None and rank.connection.data.rank == 0:
                return losses
        return None

    def _save(self, step: int) -> None:
        if self._checkpoints is None:
            return
        self._doing.begin("writing a checkpoint", kind="disk")
        self._checkpoints.save(
            Progress(step=step, seconds=self._seconds, rows=self._rows.written()),
            self._stages,
            self._program(step, 1).initial_versions,
            first=self._rows.flush,
        )

    def _finish_saving(self) -> None:
        """Wait for a checkpoint that is being written."""
        if self._checkpoints is not None:
            self._doing.begin("writing a checkpoint", kind="disk")
            self._checkpoints.finish()

    def _write_end(self, weights: Mapping[str, Tensor]) -> None:
        own = [(name, tensor_digest(tensor)) for name, tensor in weights.items()]
        digests = self._meetings.at_writer(own)
        if digests is not None:
            self._rows.end(msgspec.convert(digests, list[tuple[str, str]]), seconds=self._seconds)

    def _program(self, first_step: int, steps: int) -> Program:
        return self._run.program(first_step=first_step, steps=steps)

    def _stop_requested(self) -> bool:
        return self._stop() or self._saving_failed

    @property
    def _saving_failed(self) -> bool:
        return self._checkpoints is not None and self._checkpoints.failed

    def _finish_sending(self) -> None:
        for rank in self._ranks:
            rank.connection.links.finish()

    def _on_step(self, result: StepResult) -> None:
        """Called at each update of the last stage, in the process that holds that of data rank 0."""
        self._rows.step(result, seconds=self._seconds + result.time - self._segment_started)


def read_initial_weights(ranks: Sequence[Rank], config: ModelConfig, *, process: Process | None) -> None:
    """Read the parameters that these ranks own from `model.init`.

    Args:
        ranks: those that this process performs.
        config: of the model.
        process: this one; None: it performs all ranks of the run.
    """
    # The hash needs all of the files: one process per machine reads them; the others read their part.
    verify = process is None or process.local_rank == 0
    for rank in ranks:
        for state in rank.stages.values():
            weights = state.weights
            names = [*map(whole_name, weights.master.names), *weights.replicas[0].named_biases()]
            weights.load_initial(read_initial(config, names, verify_hash=verify))
            verify = False


def broadcast_initial_weights(ranks: Sequence[Rank], *, in_process: bool) -> None:
    """Complete the first replica of every stage: a data rank has drawn or read the parameters that it owns,
    and broadcasts them to its peers.

    Args:
        ranks: those that this process performs.
        in_process: whether they are all ranks of the run, so that nothing is waited for.
    """
    exchanges = [
        (
            state.weights,
            state.weights.hand_out(rank.connection.data, state.weights.replicas[0]),
        )
        for rank in ranks
        for state in rank.stages.values()
    ]
    for weights, exchange in exchanges:
        with weights.receiving_initial():
            if not in_process:
                exchange.wait()
            exchange.take()
