"""How an experiment's jobs stand: the runs' own files first, then SLURM's accounting, then its queue."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass

from asyncpp_cli.cluster import slurm
from asyncpp_cli.cluster.attempts import Attempt, look
from asyncpp_cli.cluster.job_states import Phase, phase_of
from asyncpp_cli.cluster.jobs import Job
from asyncpp_cli.cluster.outcome import last_lines, last_lines_of
from asyncpp_cli.cluster.slurm import AccountedJob, NoSlurmError, QueuedJob, SlurmError
from asyncpp_cli.cluster.submissions import Place, Submissions, read_submissions
from asyncpp_cli.cluster.unclaimed import Unclaimed, ended_unclaimed
from asyncpp_cli.runs import Experiment, Run, State, Status

_SECONDS_OF_DOUBT = 20.0
"""By which the clocks of two machines may differ."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A run: by its own account, and by SLURM's where it has or had a job."""

    run: Run
    status: Status
    job_id: str = ""
    job_state: str = ""
    """SLURM's word; empty if it does not know the job."""
    pending_reason: str = ""
    nodes: str = ""
    """Of the job, or of the latest attempt."""
    site: str = ""
    queued: QueuedJob | None = None
    accounted: AccountedJob | None = None
    unclaimed: Unclaimed | None = None
    """How its job ended, where that was before it claimed the run; `status` says it as well."""
    queue_known: bool = True
    """Whether SLURM says what it has of the experiment; else a run that is not going on may be queued."""

    @property
    def has_job(self) -> bool:
        """Whether SLURM has a job for it that waits, runs or ends."""
        return self.queued is not None

    @property
    def is_queued(self) -> bool:
        """Whether it waits for SLURM to start it, for the first time or again."""
        return self.queued is not None and self.status.state in (
            State.PENDING,
            State.INTERRUPTED,
            State.FAILED,
        )

    @property
    def error_lines(self) -> list[str]:
        """The last lines that the rank printed which ended a run that failed; none where it did not fail."""
        if self.status.state != State.FAILED:
            return []
        if self.unclaimed is not None:
            return last_lines_of(self.unclaimed.output) if self.unclaimed.output is not None else []
        if not self.status.attempt:
            return []
        return last_lines(Attempt(self.run, self.status.attempt))


class Queue:
    """SLURM's word on an experiment's jobs, asked for once and only if need be."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._asked_at = 0.0
        self._no_answer = ""
        self._elsewhere = False

    @functools.cached_property
    def submissions(self) -> Submissions:
        return read_submissions(self._experiment)

    @functools.cached_property
    def _here(self) -> bool:
        """Whether SLURM's commands speak to the cluster that the experiment was submitted to."""
        clusters = {submission.cluster for submission in self.submissions.all}
        try:
            here = slurm.cluster().name
        except SlurmError as error:
            self._no_answer = str(error)
            self._elsewhere = isinstance(error, NoSlurmError)
            return False
        self._elsewhere = here not in clusters
        self._no_answer = f"the cluster here is {here}"
        return here in clusters

    @functools.cached_property
    def queued(self) -> Mapping[tuple[str, int], QueuedJob] | None:
        """By name and index of the job; None where SLURM cannot be asked."""
        if not self.submissions.all:
            return {}
        if not self._here:
            return None
        try:
            self._asked_at = time.time()
            return slurm.queued(self.submissions.job_names)
        except SlurmError as error:
            self._no_answer = str(error)
            return None

    @property
    def no_answer(self) -> str:
        """Why SLURM does not say how the experiment's jobs stand; empty if it does, or never had any."""
        return self._no_answer if self.queued is None else ""

    def check_answer(self) -> None:
        """See that SLURM tells of the experiment's jobs, if it ever had any.

        Raises:
            SlurmError: it does not: what is queued cannot be known then.
        """
        if self.queued is None:
            clusters = ", ".join(sorted({submission.cluster for submission in self.submissions.all}))
            raise SlurmError(
                f"how its jobs on the cluster {clusters} stand cannot be known here: {self.no_answer}"
            )

    @functools.cached_property
    def accounted(self) -> Mapping[tuple[str, int], AccountedJob]:
        """By name and index of the job; empty where there is no accounting."""
        if not self.submissions.all or not self._here:
            return {}
        since = min(submission.time for submission in self.submissions.all)
        return slurm.accounted(self.submissions.job_names, since=since)

    @functools.cached_property
    def _places(self) -> dict[str, Place]:
        return self.submissions.places

    def is_over(self, job: Job, *, claimed: float) -> bool | None:
        """See `Scheduler`."""
        if self.queued is None and not self._elsewhere:
            return False  # it is not known to be over, and SLURM will answer again
        if self.queued is None or claimed > self._asked_at - _SECONDS_OF_DOUBT:
            return None  # it may have begun after SLURM was asked
        if job.submission not in {submission.name for submission in self.submissions.all}:
            return None
        queued = self.queued.get((job.name, job.index))
        return queued is None or phase_of(queued.state) in (Phase.WAITS, Phase.OVER)

    def standing(self, run: Run, *, with_accounting: bool) -> Standing:
        """How one run stands."""
        # SLURM is asked before the run is looked at: a job that has ended by then has said all it had to say.
        all_queued = self.queued
        status = look(run, scheduler=self)
        place = self._places.get(run.id)
        if place is None:
            return Standing(run=run, status=status)
        queued = (all_queued or {}).get(place.key)
        done = self.accounted.get(place.key) if with_accounting and queued is None else None
        job = Attempt(run, status.attempt).job if status.attempt else None
        unclaimed = None
        if all_queued is not None and queued is None:
            unclaimed = ended_unclaimed(run, status, place, done)
        return Standing(
            run=run,
            status=status if unclaimed is None else unclaimed.over(status),
            job_id=next((known.id for known in (queued, done, unclaimed, job) if known), ""),
            job_state=next((known.state for known in (queued, done) if known), ""),
            pending_reason=queued.reason if queued and phase_of(queued.state) is Phase.WAITS else "",
            nodes=next((known.nodes for known in (queued, done, job) if known and known.nodes), ""),
            site=place.submission.site,
            queued=queued,
            accounted=done,
            unclaimed=unclaimed,
            queue_known=all_queued is not None,
        )

    def standings(self, *, with_accounting: bool) -> list[Standing]:
        """How every run stands, in the order of the cells."""
        return [self.standing(run, with_accounting=with_accounting) for run in self._experiment.runs]


def standings(experiment: Experiment, *, with_accounting: bool = False) -> list[Standing]:
    """How every run stands, in the order of the cells.

    Args:
        experiment: whose.
        with_accounting: whether to ask the accounting about jobs that have ended.
    """
    return Queue(experiment).standings(with_accounting=with_accounting)
