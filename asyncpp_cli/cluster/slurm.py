"""SLURM's commands, asked with care: lists for arguments, time limits, and answers that may not come."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from asyncpp_cli.errors import UserError

USUAL_MAX_ARRAY_SIZE = 1001

_SECONDS = 60.0
_HAS_ENDED = re.compile("already complet|Invalid job id|not running", re.IGNORECASE)
"""What SLURM says of a job that is too late to be ended."""
_UNKNOWN = re.compile("Invalid job id", re.IGNORECASE)
"""What it says of one that it has forgotten."""

_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER")
"""Of the variables that begin with SLURM_, those that say where SLURM is and not what this job is."""


class SlurmError(UserError):
    """A command of SLURM's failed, or there is none; the message is its own."""


class NoSlurmError(SlurmError):
    """Its commands are not on this machine."""


@dataclass(frozen=True)
class Cluster:
    """What a cluster says of itself."""

    name: str
    version: str
    max_array_size: int
    """Array indices are below it."""


@dataclass(frozen=True)
class QueuedJob:
    """A job that SLURM still has: waiting, running or ending."""

    id: str
    """`12_3`; the number alone where it is no array's."""
    raw_id: str
    state: str
    nodes: str
    reason: str
    """Why it waits."""


@dataclass(frozen=True)
class AccountedJob:
    """What the accounting says of a job's last start."""

    id: str
    state: str
    exit_code: str
    seconds: int
    nodes: str


def ask(command: Sequence[str]) -> str:
    """What a command prints.

    Raises:
        SlurmError: it failed.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise NoSlurmError(f"there is no SLURM here: {command[0]} is not found") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not answer within {_SECONDS:g} s") from None
    if done.returncode != 0:
        raise SlurmError(f"{command[0]}: {own_words(done.stderr or done.stdout)}")
    return done.stdout


def own_words(text: str) -> str:
    """A message of SLURM's in one line, each sentence once and without the name of the command before it."""
    lines = [re.sub(r"^[a-z]+: (error: )?", "", line.strip()) for line in text.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line)) or "it failed without a word"


@functools.cache
def cluster() -> Cluster:
    """The cluster that SLURM's commands speak to.

    Raises:
        SlurmError: it does not answer.
    """
    settings = dict(re.findall(r"^(\w+)\s+= (.*?)\s*$", ask(["scontrol", "show", "config"]), re.MULTILINE))
    return Cluster(
        name=settings.get("ClusterName", ""),
        version=settings.get("SLURM_VERSION", ""),
        max_array_size=int(settings.get("MaxArraySize", USUAL_MAX_ARRAY_SIZE)),
    )


def queued(names: Collection[str]) -> dict[tuple[str, int], QueuedJob]:
    """The jobs of these names that are waiting, running or ending, by name and array index.

    Raises:
        SlurmError: SLURM does not answer.
    """
    if not names:
        return {}
    form = "%F|%K|%A|%T|%N|%r|%j"
    lines = ask(["squeue", "-h", "-r", f"--name={','.join(sorted(names))}", "-o", form]).splitlines()
    found: dict[tuple[str, int], QueuedJob] = {}
    for line in lines:
        array, index, raw, state, nodes, reason, name = line.split("|", 6)
        number = int(index) if index.isdigit() else 0
        job_id = f"{array}_{index}" if index.isdigit() else raw
        found[name.strip(), number] = QueuedJob(job_id, raw, state, nodes, "" if reason == "None" else reason)
    return found


def jobs_of_user() -> int:
    """How many jobs this user has queued or running, array tasks counted one by one."""
    return len(ask(["squeue", "-h", "-r", "-o", "%A", f"--user={os.getuid()}"]).split())


def accounted(names: Collection[str], *, since: float) -> dict[tuple[str, int], AccountedJob]:
    """What the accounting knows of the jobs of these names; nothing where there is no accounting.

    Args:
        names: of jobs.
        since: when the first of them was submitted, in seconds since 1970.
    """
    from datetime import datetime

    if not names:
        return {}
    start = datetime.fromtimestamp(since - 60).strftime("%Y-%m-%dT%H:%M:%S")
    fields = "JobID,State,ExitCode,ElapsedRaw,NodeList,JobName"
    command = ["sacct", "-a", "-n", "-P", "-X", f"--starttime={start}", f"--format={fields}"]
    try:
        lines = ask([*command, f"--name={','.join(sorted(names))}"]).splitlines()
    except SlurmError:
        return {}
    found: dict[tuple[str, int], AccountedJob] = {}
    for line in lines:
        job_id, state, code, seconds, nodes, name = line.split("|", 5)
        array, _, index = job_id.partition("_")
        for number in _indices(index):
            # "CANCELLED by 0" is a CANCELLED.
            word = state.partition(" ")[0]
            task_id = f"{array}_{number}"
            found[name, number] = AccountedJob(
                task_id, word, code, int(seconds or 0), "" if nodes == "None assigned" else nodes
            )
    return found


def _indices(text: str) -> list[int]:
    """The tasks of an array that a line is about: `3`, or `[0,2-4%2]` for those that never began."""
    indices: list[int] = []
    for part in text.strip("[]").partition("%")[0].split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            indices += range(int(first), int(last or first) + 1)
    return indices


def cancel(ids: Collection[str], *, signal: str | None = None) -> None:
    """End jobs, or only send their tasks a signal. Jobs that have ended meanwhile are no error.

    Raises:
        SlurmError: SLURM refuses.
    """
    if not ids:
        return
    try:
        ask(["scancel", *([f"--signal={signal}"] if signal else []), *sorted(ids)])
    except SlurmError as error:
        if not all(_HAS_ENDED.search(sentence) for sentence in str(error).split("; ")):
            raise


@contextmanager
def clean_environment() -> Iterator[None]:
    """In the block, a job inherits nothing of the job or of the settings that the user's shell stands in."""
    leaking = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("SLURM_", "SBATCH_", "SRUN_", "SUBMITIT_")) and name not in _KEPT
    }
    for name in leaking:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(leaking)


def without_place(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for srun without bindings to CPUs that an outer shell may have left in it."""
    bindings = ("SLURM_CPU_BIND", "SLURM_MEM_BIND", "SLURM_DISTRIBUTION")
    return {name: value for name, value in environment.items() if not name.startswith(bindings)}


def state_of(job_id: str) -> str:
    """SLURM's word for how a job stands; `gone` if it does not have it any more.

    Args:
        job_id: `12_3` for a task of an array. The task's raw id will not do: see `_of_job`.

    Raises:
        SlurmError: SLURM does not answer.
    """
    state, _ = _of_job(job_id)
    return state or "gone"


def end_of_job(job_id: str) -> float | None:
    """When a job's time limit ends it, in seconds since 1970; None if it has none, or SLURM does not say."""
    from datetime import datetime

    try:
        return datetime.fromisoformat(_of_job(job_id)[1]).timestamp()
    except (SlurmError, ValueError):
        return None


def requeue(job_id: str) -> None:
    """Put a running job back into the queue: SLURM ends it, and starts it again later.

    Args:
        job_id: `12_3` for a task of an array. Given the raw id that is the array's own, SLURM would take
            back every task, those that have just completed included.

    Raises:
        SlurmError: SLURM refuses, or does not answer.
    """
    # SLURM ends every process of the job at once, and the command that asks for it is one of them: it is to
    # live on until it has heard the answer.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
    try:
        ask(["scontrol", "requeue", job_id])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _of_job(job_id: str) -> tuple[str, str]:
    """State and end of one job; empty if SLURM does not have it.

    One task of every array, its last to be split off, has a raw id equal to the array's, and with that squeue
    lists the whole array. So a task is asked for by its name, and only its own line is read.
    """
    try:
        lines = ask(["squeue", "-h", "-r", "-j", job_id, "-o", "%A|%F_%K|%T|%e"]).splitlines()
    except SlurmError as error:
        if _UNKNOWN.search(str(error)):
            return "", ""
        raise
    for line in lines:
        raw_id, task_id, state, end = line.strip().split("|")
        if job_id in (task_id, raw_id):
            return state, end
    return "", ""
