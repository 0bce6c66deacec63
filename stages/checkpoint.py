"""Checkpoints at drains, through torch.distributed.checkpoint: written by all ranks, whole or not at all.

What a run resumes from is found by parameter name, so it may have another number of stages or data ranks.
The place in the data is the step, batches being a pure function of it, and nothing else in training is
random.

A checkpoint is written in the background: at the drain the state is copied, and training goes on while a
thread writes the copy. The ranks' threads have meetings of their own, with a time limit of its own, so a slow
disk is not mistaken for a dead rank.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages import checkpoint_files as files
from stages.authenticated import Json
from stages.checkpoint_files import CheckpointError
from stages.checkpoint_reader import CheckpointReader
from stages.checkpoint_writer import write_description, write_part
from stages.copies import HostCopies
from stages.member import Meetings
from stages.process import Process
from stages.stage_state import Saved, pack
from stages.update import StageState


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run was when it was saved."""

    step: int
    """Steps done."""
    seconds: float
    """Training time so far."""


class Checkpoints:
    """The checkpoints of one run, as one of its processes sees them. All processes call each method together.

    Args:
        folder: of all checkpoints of the run; made when the first is written.
        keep: how many of the newest are kept.
        process: this one; None where the run has no other.
        timeout: seconds that reading or writing one may take.
    """

    def __init__(self, folder: Path, *, keep: int, process: Process | None, timeout: float) -> None:
        self._folder = folder
        self._keep = keep
        self._rank = process.rank if process is not None else 0
        self._size = process.size if process is not None else 1
        self._meetings: Meetings | None = None
        if process is not None:
            self._meetings = Meetings(process.member, "checkpoints", seconds=timeout)
        self._copies = HostCopies()
        self._saving: Future[None] | None = None

    def save(
        self,
        progress: Progress,
        stages: Sequence[StageState],
        versions: Sequence[int],
        *,
        first: Callable[[], None],
    ) -> None:
        """Start to write a checkpoint of the state as it is now; an earlier one is waited for.

        Args:
            progress: what it is the checkpoint of.
            stages: those of this process. They may go on when this returns.
            versions: weight versions that the next segment starts with.
            first: called by the thread that writes, before the checkpoint counts.

        Raises:
            CheckpointError: the earlier one could not be written.
        """
        self.finish()
        tensors: dict[str, Tensor] = {}
        records = []
        for stage in stages:
            of_stage, record = pack(stage, versions)
            tensors |= of_stage
            records.append(record)
        copies = self._copies.take(tensors)
        self._saving = _in_background(lambda: self._write(progress, copies, records, versions, first=first))

    @property
    def failed(self) -> bool:
        """Whether this process knows that what is being written cannot be; `finish` says why."""
        return self._saving is not None and self._saving.done() and self._saving.exception() is not None

    def finish(self) -> None:
        """Wait for what is being written.

        Raises:
            CheckpointError: it could not be (on every process). The earlier ones are as they were.
        """
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def _write(
        self,
        progress: Progress,
        tensors: dict[str, Tensor],
        records: list[dict[str, Any]],
        versions: Sequence[int],
        *,
        first: Callable[[], None],
    ) -> None:
        step = progress.step
        unfinished = files.unfinished_folder(self._folder, step)

        def write_mine() -> Json:
            written = write_part(unfinished, tensors, rank=self._rank)
            first()
            digests = {name: files.digest(unfinished / name) for name in {part["file"] for part in written}}
            return {"written": written, "stages": records, "files": digests}

        def commit(of_ranks: list[Json]) -> None:
            write_description(unfinished, [part for one in of_ranks for part in one["written"]])
            entries = {name: entry for one in of_ranks for name, entry in one["files"].items()}
            entries[".metadata"] = files.digest(unfinished / ".metadata")
            state = {
                "seconds": progress.seconds,
                "versions": list(versions),
                "torch": torch.__version__,
                "stages": [record for one in of_ranks for record in one["stages"]],
            }
            files.commit(self._folder, step, state=state, files=entries, keep=self._keep)

        try:
            self._by_rank_0(lambda: files.begin(self._folder, step))
            of_ranks = self._at_rank_0(write_mine)
            self._by_rank_0(lambda: commit(of_ranks()))
        except OSError as error:
            if self._rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written into {self._folder}: {error}; "
                f"{self._what_is_left()}"
            ) from error

    def load(
        self, stages: Sequence[StageState], initial_versions: Callable[[int], Sequence[int]]
    ) -> Progress:
        """Go on from the newest valid checkpoint; without one, from the start.

        A damaged one is passed over with a warning on standard error.

        Args:
            stages: those of this process, as newly built; their state is replaced.
            initial_versions: weight versions that a segment starts with, by its first step.

        Raises:
            CheckpointError: it is valid, but of a run that this one cannot continue.
        """
        for step in self._by_rank_0(lambda: files.saved_steps(self._folder)):
            folder = files.folder_of(self._folder, step)
            wrong = self._damage(folder)
            if wrong is not None:
                if self._rank == 0:
                    print(f"warning: checkpoint {folder} is not used: {wrong}", file=sys.stderr, flush=True)
                continue
            try:
                progress = self._read(folder, step, stages, initial_versions(step))
            except CheckpointError as error:
                raise CheckpointError(f"checkpoint {folder}: {error}") from error
            # Nobody goes on to wait for a rank that is still reading: other meetings are shorter.
            self._first(None)
            return progress
        return Progress(step=0, seconds=0.0)

    def _read(
        self, folder: Path, step: int, stages: Sequence[StageState], versions: Sequence[int]
    ) -> Progress:
        state = files.read_state(folder)
        reader = CheckpointReader(folder)
        saved = Saved(reader.sizes(), state["stages"])
        targets = [saved.targets(stage, versions) for stage in stages]
        for of_stage in targets:
            reader.read(of_stage)
        for stage, read in zip(stages, targets, strict=True):
            saved.take(stage, versions, read)
        return Progress(step=step, seconds=float(state["seconds"]))

    def _damage(self, folder: Path) -> str | None:
        """What is wrong with a checkpoint; each process looks at its share of the files."""

        wrong: str | None
        try:
            entries = sorted(files.read_manifest(folder).items())
            wrong = files.damage(folder, entries[self._rank :: self._size])
        except CheckpointError as error:
            wrong = str(error)
        [first_wrong] = self._first(wrong)
        return None if first_wrong is None else str(first_wrong)

    def _first(self, *mine: Json) -> list[Json]:
        """Of each of several values, that of the first rank for which it is not None."""
        return list(mine) if self._meetings is None else self._meetings.first(*mine)

    def _by_rank_0(self, work: Callable[[], Json]) -> Json:
        """What rank 0's `work` gives; the others do nothing.

        Raises:
            OSError: it could not be done (on every process).
        """
        outcome, failure = None, None
        if self._rank == 0:
            try:
                outcome = work()
            except OSError as error:
                failure = f"rank 0: {error}"
        if self._rank == 0 and failure is not None and failure.startswith("rank 0: rank "):
            failure = failure.removeprefix("rank 0: ")  # another's, that rank 0 was told
        outcome, failure = self._first(outcome, failure)
        if failure is not None:
            raise OSError(failure)
        return outcome

    def _at_rank_0(self, work: Callable[[], Json]) -> Callable[[], list[Json]]:
        """Do each process's part. What is returned gives all parts, to rank 0 alone; or raises OSError where
        one failed."""
        outcome, failure = None, None
        try:
            outcome = work()
        except OSError as error:
            failure = f"rank {self._rank}: {error}"
        mine = [outcome, failure]
        of_ranks = [mine] if self._meetings is None else self._meetings.gather(mine, to=0)

        def parts() -> list[Json]:
            for _, failed in of_ranks:
                if failed is not None:
                    raise OSError(failed)
            return [part for part, _ in of_ranks]

        return parts

    def _what_is_left(self) -> str:
        steps = files.saved_steps(self._folder)
        return f"the last valid one is of step {steps[0]}" if steps else "there is no earlier one"


def _in_background(work: Callable[[], None]) -> Future[None]:
    """Call `work` in a thread that does not keep the process from ending."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, daemon=True, name="checkpoint").start()
    return future
