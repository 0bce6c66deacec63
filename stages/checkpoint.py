"""Checkpoints at drains, through torch.distributed.checkpoint: written by all ranks, whole or not at all.

What a run resumes from is found by parameter name, so it may have another number of stages or data ranks.
The place in the data is the step, batches being a pure function of it, and nothing else in training is
random.

A checkpoint is written in the background: at the drain the state is copied, and training goes on while a
thread writes the copy. The ranks' threads meet over a group of their own, with a time limit of its own, so a
slow disk is not mistaken for a dead rank.
"""

from __future__ import annotations

import datetime
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from stages import checkpoint_files as files
from stages.checkpoint_files import CheckpointError
from stages.checkpoint_reader import CheckpointReader
from stages.copies import HostCopies
from stages.process import Process
from stages.stage_state import Saved, pack
from stages.update import StageState

# A replay saves alone on purpose. Set once: filters cannot be changed for a thread alone.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


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
        self._process = process
        self._rank = process.rank if process is not None else 0
        self._size = process.size if process is not None else 1
        self._group = None if process is None else process.group(timeout=datetime.timedelta(seconds=timeout))
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

    def close(self) -> None:
        """Finish, and give back what the meetings of the processes take."""
        self.finish()
        if self._group is not None:
            dist.destroy_process_group(self._group)

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
        try:
            self._together(lambda: files.begin(self._folder, step) if self._rank == 0 else None)
            save(
                tensors,
                storage_writer=_Writer(unfinished),
                process_group=self._group,
                no_dist=self._process is None,
            )

            def finish_part() -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
                first()
                return records, self._digests(unfinished)

            written = self._together(finish_part)
            state = {
                "seconds": progress.seconds,
                "versions": list(versions),
                "torch": torch.__version__,
                "stages": [record for of_process, _ in written for record in of_process],
            }
            entries = {name: entry for _, of_process in written for name, entry in of_process.items()}

            def commit() -> None:
                if self._rank == 0:
                    files.commit(self._folder, step, state=state, files=entries, keep=self._keep)

            self._together(commit)
        except (CheckpointException, OSError) as error:
            if self._rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written into {self._folder}: {_cause(error)}; "
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
        for step in self._together(lambda: files.saved_steps(self._folder))[0]:
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
            self._together(lambda: None)
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

    def _digests(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Of the files that this process has written."""
        mine = list(folder.glob(f"__{self._rank}_*"))
        if self._rank == 0:
            mine.append(folder / ".metadata")
        return {file.name: files.digest(file) for file in mine}

    def _damage(self, folder: Path) -> str | None:
        """What is wrong with a checkpoint; each process looks at its share of the files."""

        def look() -> str | None:
            try:
                entries = sorted(files.read_manifest(folder).items())
            except CheckpointError as error:
                return str(error)
            return files.damage(folder, entries[self._rank :: self._size])

        return next((wrong for wrong in self._together(look) if wrong is not None), None)

    def _together(self, part: Callable[[], Any]) -> list[Any]:
        """Do each process's part, and give what all returned; if one of them fails, all do.

        Raises:
            OSError: what a process failed with.
        """
        outcome: Any = None
        error: OSError | None = None
        try:
            outcome = part()
        except OSError as failed:
            error = failed
        mine = (outcome, None if error is None else f"rank {self._rank}: {error}")
        everyone = [mine] if self._process is None else self._process.gather(mine, group=self._group)
        failures = [failure for _, failure in everyone if failure is not None]
        if failures:
            raise OSError(failures[0])
        return [outcome for outcome, _ in everyone]

    def _what_is_left(self) -> str:
        steps = files.saved_steps(self._folder)
        return f"the last valid one is of step {steps[0]}" if steps else "there is no earlier one"


class _Writer(FileSystemWriter):
    """Torch's writer; of a disk that is full it says so, and not what its ZIP file makes of that."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            if cause is None:
                raise
            raise cause from None


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


def _cause(error: CheckpointException | OSError) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {cause}"
    return str(error)
