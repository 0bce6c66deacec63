"""The JSON files of an attempt, each declared as a type that names its file.

attempts/N/attempt.json      `Claimed`: who claimed it, with how many processes, in which SLURM job if any
attempts/N/rank-K.json       `RankStart`: processes and node of rank K; touched as long as it runs
attempts/N/rank-K.end.json   `RankEnd`: how rank K ended
attempts/N/rank-K.error.json `RankError`: the exception that ended rank K
attempts/N/rank-K.waits.json `RankWaits`: what rank K has waited for during half of `site.timeout` and longer
attempts/N/fallen.json       `EarlyExits`: ranks that did not train to the end; watched by all supervisors
attempts/N/stop.json         `StopRequest`: request to all ranks to stop, with the reason
attempts/N/refused.json      `Refused`: why its job refused to start it
attempts/N/outcome.json      `Outcome`: state, cause and reason at its end
attempts/N/starting.err      errors of the local process that starts the ranks
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

from msgspec import field

from asyncpp_cli.runs.processes import ProcessId
from asyncpp_cli.runs.status import Cause, State, Time
from stages.config.records import Count, FileRecord, Meta, Record


@dataclass(frozen=True, kw_only=True)
class Job:
    """The SLURM job that an attempt runs in."""

    cluster: str
    """SLURM's name for the cluster."""
    name: str
    """Job name of the array, unique among all submissions."""
    index: int
    """Array index."""
    id: str
    """SLURM's id, `12_3`. SLURM reuses ids after some years; the name tells jobs apart."""
    restart: int
    """Number of times that SLURM has restarted it."""
    nodes: str
    """Its nodes, in SLURM's notation: `n[1-2]`."""
    submission: str
    """Its folder under EXPERIMENT/submissions."""


Seconds = Annotated[float, Meta(ge=0)]


class Scheduler(Protocol):
    """Says whether an attempt has ended whose processes cannot be checked from here."""

    def is_over(self, job: Job, *, claimed: float) -> bool | None:
        """Whether that start of the job has ended; None if unknown.

        Args:
            job: the job that the attempt recorded.
            claimed: seconds since the attempt was claimed, or fewer.
        """


class AttemptFile(FileRecord, frozen=True, kw_only=True):
    """A file of an attempt."""

    file_name: ClassVar[str]
    """Without `.json`; `{}` stands for the rank."""


class Claimed(AttemptFile, frozen=True, kw_only=True):
    """Who claimed the attempt, and with which resources."""

    file_name = "attempt"
    processes: Annotated[int, Meta(ge=1, le=1_000_000)]
    """One per rank; one in all for replay."""
    replay: bool
    """Whether all ranks take turns in one process."""
    gpus: Count
    """Number of GPUs that it holds."""
    threads: Count
    """Threads of each process."""
    until: Count | None = None
    """Step after which it pauses; None: it trains to the end."""
    lease: Annotated[float, Meta(gt=0)]
    """`site.lease`."""
    claimed: Time
    monotonic: float | None = None
    """The monotonic clock of that machine then, in seconds."""
    by: ProcessId
    job: Job | None = None
    site: dict[str, Any] = field(default_factory=dict)
    """Settings `site.*` of the site profile, which override the run's configuration."""
    folder: str = ""
    """Path of the attempt then, on that machine."""


class RankStart(AttemptFile, frozen=True, kw_only=True):
    """Processes of a rank: the trainer, and its supervisor if it has one."""

    file_name = "rank-{}"
    processes: tuple[ProcessId, ...]
    node: str = ""
    """SLURM's name of the node; empty if unknown."""


class RankEnd(AttemptFile, frozen=True, kw_only=True):
    """How a rank ended."""

    file_name = "rank-{}.end"
    code: int | None
    """Exit code; None if a signal ended it."""
    signal: int | None
    """The signal that ended it."""
    stopped: bool
    """Whether it was made to end: on request, or because another rank ended."""
    time: Time
    seconds: Seconds | None = None
    """Since the attempt was claimed."""


NO_SPACE = "NoSpaceError"
"""`RankError.kind` of any error that a full disk is the cause of."""


class RankError(AttemptFile, frozen=True, kw_only=True):
    """The exception that ended a rank."""

    file_name = "rank-{}.error"
    kind: str = ""
    """Name of its class."""
    message: str
    time: Time


class RankWaits(AttemptFile, frozen=True, kw_only=True):
    """What a rank has long waited for (`stages.liveness.watchdog`)."""

    file_name = "rank-{}.waits"
    text: str
    peer: int
    time: Time


class EarlyExit(Record, frozen=True, kw_only=True):
    """A rank that did not train to the end."""

    rank: Count
    failed: bool
    """It failed by itself: it was neither stopped, nor did it vanish without recording its end."""


class EarlyExits(AttemptFile, frozen=True, kw_only=True):
    """The first two ranks that failed, and the first two that were made to end.

    Enough for every rank to see one other than itself, and small however many ranks exit.
    """

    file_name = "fallen"
    fallen: tuple[EarlyExit, ...] = ()

    def with_exit(self, new: EarlyExit) -> EarlyExits | None:
        """These and one more; None if it does not need to be added."""
        same_kind = [other for other in self.fallen if other.failed == new.failed]
        if len(same_kind) == 2 or any(other.rank == new.rank for other in self.fallen):
            return None
        return EarlyExits(fallen=(*self.fallen, new))


class StopRequest(AttemptFile, frozen=True, kw_only=True):
    """A request to all ranks to save and end."""

    file_name = "stop"
    reason: str
    cause: Cause = Cause.STOPPED
    time: Time = 0.0


class Refused(AttemptFile, frozen=True, kw_only=True):
    """Why a job refused to start the attempt."""

    file_name = "refused"
    reason: str


class Outcome(AttemptFile, frozen=True, kw_only=True):
    """How the attempt ended."""

    file_name = "outcome"
    state: State
    cause: Cause
    reason: str
    time: Time
    seconds: Seconds | None = None
    """From the claim to the attempt's last sign of life; None in files of before, which have `last_sign`."""
    last_sign: Time | None = None
    """By the clock of the machine that wrote it."""
