"""Records of what was submitted to SLURM: which runs, as which tasks of which arrays.

    EXPERIMENT/submissions/NAME/submission.json   arrays, site, user, code and software versions
    EXPERIMENT/submissions/NAME/array-K.json      manifest of one array (`launch.common.arrays.ArrayManifest`)
    EXPERIMENT/submissions/NAME/*.out, *.sh       output of the jobs, and their scripts

The JSON files are written before anything is submitted, and array names are unique: even if the submitting
process is killed, its jobs are known and found by name.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncpp_cli.base.atomic_files import locked, read_json, write_json
from asyncpp_cli.base.errors import DamagedError
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.run_folder import FORMAT, FolderName, RunId, is_copy
from stages.config.records import converted

_FILE = "submission.json"
_BEGAN = "%Y%m%d-%H%M%S"


@dataclass(frozen=True, kw_only=True)
class SubmittedArray:
    """A job array of runs of one shape; the position of a run is its array index."""

    name: str
    """Job name, unique among all arrays."""
    file: FolderName
    """Name of its manifest in the submission's folder."""
    runs: tuple[RunId, ...]
    shape: str
    """Shape of its jobs, for people."""
    after: str = ""
    """Name of the array that must have ended before it starts."""
    id: str = ""
    """SLURM's id; empty if the submitting process was killed before it recorded it."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One submission: a folder under EXPERIMENT/submissions."""

    folder: Path
    site: str
    """What `--site` takes for its profile: a name, or an absolute path."""
    cluster: str
    user: str
    host: str
    time: float
    """Seconds since 1970."""
    state: str
    """`submitting`, `submitted` or `withdrawn`."""
    interpreter: str
    software: dict[str, str]
    code: FolderName
    """Folder under EXPERIMENT/code."""
    arrays: tuple[SubmittedArray, ...]
    end: str = ""
    """Name of the job that tells the end, if there is one."""
    follow_up: str = ""
    """Name of the job that goes on with a tuning when the arrays have ended, if there is one."""

    path: str = ""
    """Path of the submission's folder when it was made."""

    @property
    def name(self) -> str:
        return self.folder.name


@dataclass(frozen=True, kw_only=True)
class ArrayTask:
    """The array task of a run in a submission."""

    submission: Submission
    array: SubmittedArray
    index: int

    @property
    def key(self) -> tuple[str, int]:
        """Job name and array index."""
        return self.array.name, self.index


@dataclass(frozen=True)
class Submissions:
    """All submissions of an experiment, the latest last."""

    all: list[Submission]
    array_tasks: dict[str, ArrayTask]
    """The latest array task of every run that was ever submitted."""

    @property
    def job_names(self) -> set[str]:
        """Names of the runs' latest arrays: a run is submitted again only when no job of it is queued."""
        return {task.array.name for task in self.array_tasks.values()}


def read_submissions(experiment: Experiment) -> Submissions:
    """The submissions of an experiment; those of the experiment that it is a copy of are not its own."""
    submissions = []
    for file in sorted(experiment.submissions.glob(f"*/{_FILE}")):
        try:
            content = read_json(file, newest_format=FORMAT) | {"folder": file.parent}
            submission = converted(content, Submission, where=str(file))
        except DamagedError:
            continue  # the runs' own files remain
        if not is_copy(submission.folder, of=submission.path):
            submissions.append(submission)
    tasks = {
        run_id: ArrayTask(submission=submission, array=array, index=index)
        for submission in submissions
        if submission.state != "withdrawn"
        for array in submission.arrays
        for index, run_id in enumerate(array.runs)
    }
    return Submissions(submissions, tasks)


def write_submission(submission: Submission) -> None:
    """Write submission.json."""
    content: dict[str, Any] = asdict(submission)
    content.pop("folder")
    write_json(submission.folder / _FILE, {"format": FORMAT} | content)


def new_folder(experiment: Experiment) -> Path:
    """Make a folder for a submission; later ones sort behind it, whatever the clocks show."""
    from datetime import datetime, timedelta

    began = time.strftime(_BEGAN)
    for earlier in experiment.submissions.glob("*/"):
        with suppress(ValueError):
            next_second = datetime.strptime(earlier.name[: len(began)], _BEGAN) + timedelta(seconds=1)
            began = max(began, next_second.strftime(_BEGAN))
    folder = experiment.submissions / f"{began}-{secrets.token_hex(3)}"
    folder.mkdir(parents=True)
    return folder


def job_name(experiment: Experiment, folder: Path, suffix: str) -> str:
    """A unique, readable job name."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", experiment.name)[:40] or "experiment"
    return f"asyncpp-{readable}-{folder.name}-{suffix}"


@contextmanager
def submission_lock(experiment: Experiment) -> Iterator[None]:
    """Keep other processes from submitting for this experiment."""
    with ExitStack() as stack:
        # Without a lock (a full disk), a run that is submitted twice is still executed once.
        with suppress(OSError):
            experiment.submissions.mkdir(exist_ok=True)
            stack.enter_context(locked(experiment.submissions / "lock"))
        yield
