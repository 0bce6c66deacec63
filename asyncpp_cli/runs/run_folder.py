"""The run folder: paths, configuration, status, metrics and timeline of one run, its id and its parent.

EXPERIMENT/runs/ID/config.yaml     resolved configuration, never changed
EXPERIMENT/runs/ID/parent.json     the run and step whose checkpoint a run starts from, and what was changed
EXPERIMENT/runs/ID/status.json     state and progress, replaced atomically
EXPERIMENT/runs/ID/metrics.jsonl   append-only within an attempt, one JSON object per line
EXPERIMENT/runs/ID/timeline.json   action times of the latest segment, replaced atomically
EXPERIMENT/runs/ID/lock            held while the status is changed; touched to read the file server's clock
EXPERIMENT/runs/ID/logs/           output of each rank of each attempt
EXPERIMENT/runs/ID/code/           see `experiment.own_code`
EXPERIMENT/runs/ID/checkpoints/    see `stages.checkpoint.files`
EXPERIMENT/runs/ID/attempts/N/     see `runs.attempts.attempt`
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from asyncpp_cli.base.atomic_files import locked, read_json, remove_temporary, write_json
from asyncpp_cli.base.errors import DamagedError, UserError
from asyncpp_cli.runs.status import CLOCK_MARGIN, UNKNOWN, State, Status
from stages.checkpoint.files import Owner, saved_steps
from stages.config.records import Count, FileRecord, Meta, read_record
from stages.config.run_config import RunConfig
from stages.rows import Evaluation, Row, read

FORMAT = 1
"""Format number of the JSON files of an experiment; readers refuse a later one."""


LINEAGE_FILE = "parent.json"

_PLAIN_NAME = r"\A[A-Za-z0-9_=][A-Za-z0-9._=-]{0,199}\Z"
"""Names of one file that is not hidden: no separators, no "..", not empty."""
_NAME_TEXT = "of up to 200 letters, digits, dots, dashes, = and _ that begins with no dot or dash"

RunId = Annotated[str, Meta(pattern=_PLAIN_NAME, description=f"a run's id {_NAME_TEXT}")]
FolderName = Annotated[str, Meta(pattern=_PLAIN_NAME, description=f"a name {_NAME_TEXT}")]
"""Name of a file or folder in a known place."""


class Lineage(FileRecord, frozen=True, kw_only=True):
    """The run that a run continues."""

    experiment: str
    """Its experiment's folder, absolute, at the time."""
    run: RunId
    step: Count
    """Step of the checkpoint that is continued."""
    steps: Count
    """Its number of steps in all."""
    saved_by: Owner
    """The run that the checkpoint names: this one, or one that this one continues itself."""
    changed: dict[str, tuple[Any, Any]]
    """Old and new value of each configuration key that was changed, as a list of two."""

    @property
    def text(self) -> str:
        """On one line, for people."""
        changes = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in self.changed.items())
        return f"continues {self.run} from step {self.step} of {self.steps} ({changes})"

    @property
    def label(self) -> str:
        """The part that all seeds of a cell have in common: a value of the axis `continues`."""
        return f"step {self.step} of {self.steps}"


HASH_DIGITS = 8
"""Length of the hash at the end of a run's id."""


def run_hash(config_sha256: str, *, continues: tuple[str, int] | None = None) -> str:
    """The hash whose first digits end a run's id.

    Args:
        config_sha256: of its configuration (`config_hash`).
        continues: id and step of the run that it continues; None: it starts from the beginning.
    """
    if continues is None:
        return config_sha256
    parent, step = continues
    return hashlib.sha256(f"{config_sha256} {parent} {step}".encode()).hexdigest()


_seen: dict[Path, tuple[float, float, float]] = {}
"""By file whose age was asked: modification time, age, and the monotonic clock when that was first seen."""

_HASH_IN_ID = re.compile(rf"-([0-9a-f]{{{HASH_DIGITS}}})$")


@dataclass(frozen=True)
class Inside:
    """A path in the `folder` of an experiment, a run or an attempt, declared as a field of its class."""

    name: str

    def __get__(self, place: Any, _kind: type) -> Path:
        return Path(place.folder / self.name)


@dataclass(frozen=True)
class Run:
    """A run's folder."""

    folder: Path

    @property
    def id(self) -> str:
        return self.folder.name

    config_file = Inside("config.yaml")
    status_file = Inside("status.json")
    metrics_file = Inside("metrics.jsonl")
    timeline_file = Inside("timeline.json")
    logs = Inside("logs")
    code = Inside("code")
    """Copy of the run's own code."""
    attempts = Inside("attempts")
    checkpoints = Inside("checkpoints")

    @property
    def saved_steps(self) -> tuple[int, ...]:
        """Steps of the checkpoints, newest first; none if the folder cannot be listed."""
        try:
            return tuple(saved_steps(self.checkpoints))
        except OSError:
            return ()

    @property
    def saved_step(self) -> int | None:
        """Step of the newest checkpoint; None if there is none."""
        return next(iter(self.saved_steps), None)

    def locked(self) -> AbstractContextManager[None]:
        """Hold the lock under which the run's status is changed."""
        return locked(self.folder / "lock")

    def age(self, file: Path) -> float:
        """Seconds since one of the run's files was written or touched; 0 if that cannot be known.

        Its age when this process first sees it so is by the file server's clock alone, or by that of this
        machine less `CLOCK_MARGIN` where the lock cannot be touched, as in another user's run. From then on
        this process counts, and no clock that is set matters.
        """
        try:
            changed = modified(file)
            if _seen.get(file, (None,))[0] != changed:
                _seen[file] = changed, max(0.0, self._file_server_time() - changed), time.monotonic()
        except OSError:
            return 0.0
        _, age, seen = _seen[file]
        return age + time.monotonic() - seen

    def _file_server_time(self) -> float:
        lock = self.folder / "lock"
        try:
            os.utime(lock)
            return modified(lock)
        except OSError:
            return time.time() - CLOCK_MARGIN

    def config(self) -> RunConfig:
        """The run's resolved configuration.

        Raises:
            DamagedError: the file is missing, is not a run configuration, or is another run's.
        """
        from asyncpp_cli.runs.config_file import read_config
        from asyncpp_cli.runs.settings import config_hash

        config = read_config(self.config_file)
        if (named := _HASH_IN_ID.search(self.id)) is not None:
            lineage = self.lineage()
            continues = None if lineage is None else (lineage.run, lineage.step)
            found = run_hash(config_hash(config), continues=continues)[:HASH_DIGITS]
            if found != named[1]:
                raise DamagedError(
                    f"{self.config_file} is another run's: its settings make the hash {found}, and the id "
                    f"ends in {named[1]}"
                )
        return config

    def status(self) -> Status:
        """Content of status.json. Where it was removed: `running` in the latest attempt, whose files tell
        how that ended (`runs.attempts.settle`); `pending` if there was none.

        Raises:
            DamagedError: the file cannot be read, or the run's folder is gone.
        """
        try:
            status = read_record(self.status_file, Status)
        except FileNotFoundError:
            if not self.folder.is_dir():
                raise DamagedError(f"{self.folder} is gone") from None
            claimed = [int(file.parent.name) for file in self.attempts.glob("[1-9]*/attempt.json")]
            if not claimed:
                return Status(state=State.PENDING)
            steps = 0
            with contextlib.suppress(DamagedError):
                steps = self.config().train.steps
            return Status(state=State.RUNNING, attempt=max(claimed), steps=steps)
        if status.state in UNKNOWN:
            raise DamagedError(f"{self.status_file}: state is {status.state}, which is never written")
        return status

    def lineage(self) -> Lineage | None:
        """The run that this one continues; None for a run from the beginning.

        Raises:
            DamagedError: parent.json cannot be read.
        """
        try:
            return read_record(self.folder / LINEAGE_FILE, Lineage)
        except FileNotFoundError:
            return None

    def write_status(self, status: Status, *, unless: Callable[[], bool] | None = None) -> None:
        """Replace status.json atomically, unless this holds once the temporary file is there."""
        write_json(self.status_file, {"format": FORMAT} | asdict(status), unless=unless)

    def drop_unwritten_status(self) -> None:
        """Remove temporary files of `write_status`, whose writers then fail; the caller holds the lock."""
        remove_temporary(self.status_file)

    def timeline(self) -> Mapping[str, Any] | None:
        """Times of the latest segment's last actions (`stages.pipeline.timeline`); None if there are none.

        Raises:
            DamagedError: the file cannot be read.
        """
        try:
            return read_json(self.timeline_file, newest_format=FORMAT)
        except FileNotFoundError:
            return None

    def write_timeline(self, timeline: Mapping[str, Any]) -> None:
        """Replace timeline.json atomically."""
        write_json(self.timeline_file, {"format": FORMAT} | dict(timeline))

    def rows(self) -> list[Row]:
        """The metrics rows, without those that a later attempt repeated; lines that are torn are left out.

        Raises:
            RowError: a row lacks a field of its kind, or has a value of another type in it.
        """
        return read(self.metrics_lines())[0]

    def validation_losses(self) -> dict[int, float]:
        """Validation loss by step, nats per token; without reading the rows of steps, nor damaged ones."""
        lines = (line for line in self.metrics_lines() if b'"kind": "step"' not in line)
        rows, _ = read(lines, all_whole=False)
        return {row.step: row.val_loss for row in rows if isinstance(row, Evaluation)}

    def metrics_lines(self) -> list[bytes]:
        """The lines of the metrics; none if the file is missing."""
        try:
            return self.metrics_file.read_bytes().splitlines()
        except FileNotFoundError:
            return []


def is_copy(folder: Path, *, of: str) -> bool:
    """Whether a folder that was at the path `of` once is a copy, and what is there now is the original."""
    try:
        return bool(of) and not folder.samefile(of)
    except OSError:
        return False  # it was moved, or its copy alone is left


def modified(file: Path) -> float:
    """When a file was written or touched, by the file server's clock."""
    # Opened, because a network file system may answer stat() from what it remembers.
    with file.open("rb") as opened:
        return os.fstat(opened.fileno()).st_mtime


def open_run(folder: Path) -> Run:
    """The run in a folder.

    Raises:
        UserError: the folder holds none.
    """
    run = Run(folder)
    if not run.config_file.is_file():
        raise UserError(
            f"{folder} is not a run: it has no {run.config_file.name} (look into EXPERIMENT/runs)"
        )
    return run
