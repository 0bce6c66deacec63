"""What was submitted to a cluster: which runs, as which tasks of which arrays.

    EXPERIMENT/submissions/NAME/submission.json   what was submitted, by whom, and with what
    EXPERIMENT/submissions/NAME/array-K.json      what the tasks of one array read when they begin
    EXPERIMENT/submissions/NAME/*.out, *.sh       what the jobs printed, and the scripts

Both are written before anything is submitted, and an array's name is its own: whatever becomes of the process
that submits, its jobs do what was meant, and are found again by that name.
"""

from __future__ import annotations

import fcntl
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asyncpp_cli.errors import DamagedError
from asyncpp_cli.files import read_json, write_json
from asyncpp_cli.runs import FORMAT, Experiment

_FILE = "submission.json"


@dataclass(frozen=True, kw_only=True)
class Array:
    """Runs of one shape, in one job array; a run's place is its index."""

    name: str
    """Of the job: no other array has it."""
    file: str
    """What its tasks read, in the submission's folder."""
    runs: tuple[str, ...]
    shape: str
    """In words."""
    after: str = ""
    """Name of the array that must have ended before it begins."""
    id: str = ""
    """SLURM's number; empty where the process that submitted it did not live to write it."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A folder under EXPERIMENT/submissions."""

    folder: Path
    site: str
    cluster: str
    user: str
    host: str
    time: float
    """Seconds since 1970."""
    state: str
    """`submitting`, `submitted` or `withdrawn`."""
    interpreter: str
    software: dict[str, str]
    code: str
    """Folder under EXPERIMENT/code."""
    arrays: tuple[Array, ...]
    report: str = ""
    """Name of the job that writes the report, if there is one."""

    @property
    def name(self) -> str:
        return self.folder.name


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run stands in a submission."""

    submission: Submission
    array: Array
    index: int

    @property
    def key(self) -> tuple[str, int]:
        """The job's name and array index."""
        return self.array.name, self.index


@dataclass(frozen=True)
class Submissions:
    """All submissions of an experiment, the latest last."""

    all: list[Submission] = field(default_factory=list)

    @property
    def places(self) -> dict[str, Place]:
        """The last place of every run that was ever submitted."""
        return {
            run_id: Place(submission=submission, array=array, index=index)
            for submission in self.all
            if submission.state != "withdrawn"
            for array in submission.arrays
            for index, run_id in enumerate(array.runs)
        }

    @property
    def job_names(self) -> set[str]:
        """Of the arrays."""
        return {array.name for submission in self.all for array in submission.arrays}


def read_submissions(experiment: Experiment) -> Submissions:
    """The submissions of an experiment."""
    found = []
    for file in sorted(experiment.submissions.glob(f"*/{_FILE}")):
        try:
            content = read_json(file, newest_format=FORMAT)
            content.pop("format")
            arrays = tuple(Array(**array | {"runs": tuple(array["runs"])}) for array in content.pop("arrays"))
            submission = Submission(folder=file.parent, arrays=arrays, **content)
        except (DamagedError, KeyError, TypeError):
            continue  # it says nothing; the runs' own files and the names of the jobs still do
        found.append(submission)
    return Submissions(found)


def write_submission(submission: Submission) -> None:
    """Write submission.json."""
    content: dict[str, Any] = asdict(submission)
    content.pop("folder")
    write_json(submission.folder / _FILE, {"format": FORMAT} | content)


def new_folder(experiment: Experiment) -> Path:
    """A folder for a submission, named so that later ones sort behind it."""
    folder = experiment.submissions / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    folder.mkdir(parents=True)
    return folder


def job_name(experiment: Experiment, folder: Path, suffix: str) -> str:
    """A name for a job that says what it is and that no other job has."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", experiment.name)[:40] or "experiment"
    return f"asyncpp-{readable}-{folder.name}-{suffix}"


@contextmanager
def submitting(experiment: Experiment) -> Iterator[None]:
    """Keep other processes from submitting for this experiment meanwhile."""
    experiment.submissions.mkdir(exist_ok=True)
    with (experiment.submissions / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            # No locks on this filesystem. A run that is submitted twice is still executed once.
            yield
            return
        yield
