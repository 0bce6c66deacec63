"""Checkpoints at drains, written by all ranks.

State is saved by parameter name, so a run may resume with another number of stages or data ranks. The
position in the data follows from the step, and nothing else in training is random.

A checkpoint is written in the background: at the drain the state is copied, and training continues while a
thread writes the copy. These threads have their own meetings with their own time limit, so a slow disk is not
mistaken for a dead rank.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from stages.checkpoint import files
from stages.checkpoint.files import (
    CheckpointError,
    FileEntry,
    FormatError,
    Index,
    LostCheckpointError,
    Owner,
    StageRecord,
)
from stages.checkpoint.state import Saved, pack
from stages.checkpoint.tensors import CheckpointReader, HostCopies, write_tensors
from stages.comm.communicator import in_background
from stages.comm.process import Process
from stages.comm.rendezvous.authenticated import Json
from stages.comm.rendezvous.client import Meetings
from stages.update.optimizer_step import STEPS_TO_FULL_STATE, StageState


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The position of a run in its training when it was saved."""

    step: int
    """Steps done."""
    seconds: float
    """Training time so far."""
    rows: FileEntry | None = None
    """The metrics so far, on the process that writes them."""


class Checkpoints:
    """The checkpoints of a run. All processes of the run call each method together.

    Args:
        folder: of the run's checkpoints; created with the first one.
        keep: number of newest checkpoints to keep.
        process: this one; None if it is the only one (replay).
        timeout: limit of reading or writing a checkpoint, seconds.
        oldest: step of the first one, if the run continues another; 0: a run may start without any.
        owners: the run, and others whose checkpoints it may continue from; none: it has no name, and takes
            any that fits.
        has_rows: whether the run's metrics still have the rows before the checkpoint of a step.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        process: Process | None,
        timeout: float,
        oldest: int,
        owners: Sequence[Owner],
        has_rows: Callable[[int], bool] = lambda step: True,
    ) -> None:
        self._folder = folder
        self._has_rows = has_rows
        self._owners = owners
        self._oldest = oldest
        self._keep = keep
        self._rank = process.rank if process is not None else 0
        self._size = process.size if process is not None else 1
        self._meetings: Meetings | None = None
        if process is not None:
            self._meetings = Meetings(process.member, "checkpoints", seconds=timeout)
        self._copies = HostCopies()
        self._saving: Future[object] | None = None

    def save(
        self,
        progress: Progress,
        stages: Sequence[StageState],
        versions: Sequence[int],
        *,
        first: Callable[[], None],
    ) -> None:
        """Start to write a checkpoint of the current state, after waiting for the previous one.

        Args:
            progress: position of the run.
            stages: those of this process; they may change once this returns.
            versions: weight versions that the next segment starts with.
            first: called by the writing thread before the checkpoint is completed.

        Raises:
            CheckpointError: the previous one could not be written.
        """
        self.finish()
        tensors: dict[str, Tensor] = {}
        records = []
        for stage in stages:
            stage_tensors, record = pack(stage, versions)
            tensors |= stage_tensors
            records.append(record)
        copies = self._copies.take(tensors)
        self._saving = in_background(
            lambda: self._write(progress, copies, records, versions, first=first), name="checkpoint"
        )

    @property
    def failed(self) -> bool:
        """Whether this process knows that the checkpoint in progress has failed; `finish` raises the
        error."""
        return self._saving is not None and self._saving.done() and self._saving.exception() is not None

    def finish(self) -> None:
        """Wait for the checkpoint in progress.

        Raises:
            CheckpointError: it could not be written (raised on every process). Earlier ones are unchanged.
        """
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def _write(
        self,
        progress: Progress,
        tensors: dict[str, Tensor],
        records: list[StageRecord],
        versions: Sequence[int],
        *,
        first: Callable[[], None],
    ) -> None:
        step = progress.step
        unfinished = files.unfinished_folder(self._folder, step)

        def write_own_part() -> Json:
            file = unfinished / f"rank-{self._rank}.safetensors"
            places, entry = write_tensors(file, tensors)
            first()
            own = {"tensors": places, "stages": records, "files": {file.name: entry}, "rows": progress.rows}
            return msgspec.to_builtins(own)

        def commit(parts: list[Json]) -> None:
            index = msgspec.convert(
                {
                    "format": files.FORMAT,
                    "step": step,
                    "owner": self._owners[0] if self._owners else None,
                    "torch": str(torch.__version__),
                    "seconds": progress.seconds,
                    "versions": list(versions),
                    "rows": next((part["rows"] for part in parts if part["rows"]), None),
                    "tensors": {key: place for part in parts for key, place in part["tensors"].items()},
                    "stages": [record for part in parts for record in part["stages"]],
                },
                Index,
            )
            entries = {name: entry for part in parts for name, entry in part["files"].items()}
            files.commit(self._folder, index, msgspec.convert(entries, dict[str, FileEntry]), keep=self._keep)

        try:
            self._on_rank_0(lambda: files.begin(self._folder, step))
            parts = self._gather_on_rank_0(write_own_part)
            self._on_rank_0(lambda: commit(parts()))
        except OSError as error:
            if self._rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written into {self._folder}: {error}; "
                f"{self._last_valid()}"
            ) from error

    def load(
        self, stages: Sequence[StageState], initial_versions: Callable[[int], Sequence[int]]
    ) -> Progress:
        """Load the newest checkpoint that is whole and fits this run; without any, start from step 0.

        One that is damaged, does not fit, or comes after rows that the metrics have lost is skipped with a
        warning on standard error.

        Args:
            stages: those of this process, newly built; their state is replaced.
            initial_versions: weight versions that a segment starts with, by its first step.

        Raises:
            FormatError: it is of another format.
            LostCheckpointError: none fits, but one is whole; the metrics lack the rows before all of them; or
                the run must not start from step 0.
        """
        misfit = None

        steps, without_rows = self._on_rank_0(self._begin)
        if without_rows and not steps:
            raise LostCheckpointError(
                f"the run's metrics have lost the rows before its checkpoints of steps {without_rows}"
            )
        for step in steps:
            folder = files.folder_of(self._folder, step)
            wrong = self._damage(folder)
            if wrong is None:
                try:
                    progress, wrong = self._read(folder, stages, initial_versions(step)), None
                except CheckpointError as error:
                    progress, wrong = None, str(error)
                # All wait here until the slowest has read: other meetings have shorter limits.
                [wrong] = self._first(wrong)
                if wrong is None and progress is not None:
                    return progress
                misfit = misfit or f"{folder}: {wrong}"
            if self._rank == 0:
                print(f"warning: checkpoint {folder} is not used: {wrong}", file=sys.stderr, flush=True)
        if misfit is not None:
            raise LostCheckpointError(
                f"no checkpoint fits this run ({misfit}); to start it from step 0, remove its checkpoints"
            )
        if self._oldest:
            raise LostCheckpointError(
                f"the run continues another from step {self._oldest}, and has no valid checkpoint of that "
                "step or a later one"
            )
        return Progress(step=0, seconds=0.0)

    def _begin(self) -> tuple[list[int], list[int]]:
        """Steps that have checkpoints, with and without the rows before them; no earlier attempt can complete
        another one afterwards."""
        files.remove_unfinished(self._folder)
        steps = files.saved_steps(self._folder)
        lost = [step for step in steps if not self._has_rows(step)]
        for step in lost:
            folder = files.folder_of(self._folder, step)
            print(f"warning: checkpoint {folder} is not used: the metrics have lost rows", file=sys.stderr)
        return [step for step in steps if step not in lost], lost

    def _read(self, folder: Path, stages: Sequence[StageState], versions: Sequence[int]) -> Progress:
        """Read a checkpoint into the tensors of the stages, and of the states that optimizers and corrections
        must have after as many updates."""
        index = files.read_index(folder)
        files.check_owner(index, self._owners)
        reader = CheckpointReader(folder, index)
        saved = Saved(reader.forms(), index.stages)
        states = [
            stage.update.state_after(min(saved.updates(stage.weights.master.names), STEPS_TO_FULL_STATE))
            for stage in stages
        ]
        targets = [saved.targets(stage, versions, state) for stage, state in zip(stages, states, strict=True)]
        for stage_targets in targets:
            reader.read(stage_targets)
        for stage, state, stage_targets in zip(stages, states, targets, strict=True):
            for replica, version in zip(stage.weights.replicas, versions, strict=False):
                replica.version = version
            saved.take(stage, state, stage_targets)
        return Progress(step=index.step, seconds=index.seconds)

    def _damage(self, folder: Path) -> str | None:
        """Describe the damage of a checkpoint, if any; each process checks its share of the files."""

        wrong: str | None
        other_format = None
        try:
            entries = sorted(files.read_manifest(folder).items())
            wrong = files.damage(folder, entries[self._rank :: self._size])
        except FormatError as error:
            wrong = other_format = str(error)
        except CheckpointError as error:
            wrong = str(error)
        first_wrong, other_format = self._first(wrong, other_format)
        if other_format is not None:
            raise FormatError(f"checkpoint {folder} cannot be read: {other_format}")
        return None if first_wrong is None else str(first_wrong)

    def _first(self, *values: Json) -> list[Json]:
        """For each of several values, that of the first rank where it is not None."""
        return list(values) if self._meetings is None else self._meetings.first(*values)

    def _on_rank_0(self, work: Callable[[], Json]) -> Json:
        """Run `work` on rank 0 only; returns its result on every process.

        Raises:
            OSError: it failed (raised on every process).
        """
        outcome, failure = None, None
        if self._rank == 0:
            try:
                outcome = work()
            except OSError as error:
                # What fails may be another rank's failure, reported to rank 0.
                said = str(error)
                failure = [error.errno, said if said.startswith("rank ") else f"rank 0: {said}"]
        outcome, failure = self._first(outcome, failure)
        if failure is not None:
            raise _failed(*failure)
        return outcome

    def _gather_on_rank_0(self, work: Callable[[], Json]) -> Callable[[], list[Json]]:
        """Run `work` on every process. The returned function gives the results of all, on rank 0 only, or
        raises the OSError of one that failed."""
        outcome, failure = None, None
        try:
            outcome = work()
        except OSError as error:
            failure = [error.errno, f"rank {self._rank}: {error}"]
        own = [outcome, failure]
        by_rank = [own] if self._meetings is None else self._meetings.gather(own, to=0)

        def parts() -> list[Json]:
            for _, failure in by_rank:
                if failure is not None:
                    raise _failed(*failure)
            return [part for part, _ in by_rank]

        return parts

    def _last_valid(self) -> str:
        steps = files.saved_steps(self._folder)
        return f"the last valid one is of step {steps[0]}" if steps else "there is no earlier one"


def _failed(number: int | None, message: str) -> OSError:
    """The error of another process, which has told of it."""
    error = OSError(message)
    error.errno = number
    return error
