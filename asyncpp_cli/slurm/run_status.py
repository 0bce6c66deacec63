"""Status of runs and their SLURM jobs, from the runs' own files, SLURM's queue and its accounting."""

from __future__ import annotations

import functools
import math
import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from asyncpp_cli.base.console import printable
from asyncpp_cli.base.errors import DamagedError
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.cost import cost_of_run
from asyncpp_cli.runs.attempts.files import Claimed, Job
from asyncpp_cli.runs.attempts.outcome import last_lines, tail
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.experiment_folder import Experiment, config_problem
from asyncpp_cli.runs.processes import user_name
from asyncpp_cli.runs.run_folder import Run, modified
from asyncpp_cli.runs.status import CLOCK_MARGIN, UNKNOWN, Cause, State, Status, state_after
from asyncpp_cli.slurm import client as slurm
from asyncpp_cli.slurm.client import (
    AccountedJob,
    JobPhase,
    NoSlurmError,
    QueuedJob,
    SlurmError,
    phase_of,
)
from asyncpp_cli.slurm.submissions import ArrayTask, read_submissions

_SECONDS_TO_END = 600.0
"""Time within which a job is over that has completed its run."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """Status of a run from its own files, with its SLURM job if it has or had one."""

    run: Run
    status: Status
    job_id: str = ""
    job_state: str = ""
    """SLURM's state of the job; empty if unknown."""
    pending_reason: str = ""
    nodes: str = ""
    """Nodes of the job, or of the latest attempt."""
    site: str = ""
    queued: QueuedJob | None = None
    accounted: AccountedJob | None = None
    unclaimed: UnclaimedJob | None = None
    """Set if its job ended before it claimed the run; `status` then reflects that."""
    queue_known: bool = True
    """Whether SLURM's queue is known; otherwise a run that is not running may be queued."""

    @property
    def has_job(self) -> bool:
        """Whether SLURM has a pending, running or ending job for it."""
        return self.queued is not None

    @property
    def is_live(self) -> bool:
        """Whether it is running, or has a job."""
        return self.has_job or self.status.state == State.RUNNING

    @property
    def is_accounted_live(self) -> bool:
        """Whether SLURM's accounting has its latest job as waiting or running; asked for ended jobs alone."""
        state = "" if self.accounted is None else self.accounted.state
        # A job that was queued again and cancelled then may stay REQUEUED.
        return state not in ("", "REQUEUED") and phase_of(state) is not JobPhase.ENDED

    @property
    def is_queued(self) -> bool:
        """Whether it waits for SLURM to start or restart it."""
        return self.queued is not None and self.status.state in (
            State.PENDING,
            State.PAUSED,
            State.INTERRUPTED,
            State.FAILED,
        )

    @property
    def error_lines(self) -> list[str]:
        """For a failed run, the last lines printed by the rank that failed first."""
        if self.status.state != State.FAILED:
            return []
        if self.unclaimed is not None:
            return tail(self.unclaimed.output) if self.unclaimed.output is not None else []
        if not self.status.attempt:
            return []
        return last_lines(Attempt(self.run, self.status.attempt))


class SlurmQueue:
    """SLURM's queue and accounting for an experiment's jobs, each queried at most once, on first use."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self.submissions = read_submissions(experiment)
        self._queried_at = -math.inf
        self._no_answer = ""
        self._elsewhere = False

    @functools.cached_property
    def _here(self) -> bool:
        """Whether SLURM's commands use a cluster that the experiment was submitted to."""
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
        """Queued jobs by name and array index; None if SLURM cannot be queried."""
        self._queried_at = time.monotonic()
        if not (names := self._open_names()):
            return {}
        if not self._here:
            return None
        try:
            return slurm.queued_jobs(names)
        except SlurmError as error:
            self._no_answer = str(error)
            return None

    def _open_names(self) -> set[str]:
        """Names of the arrays of which a job may be queued; a task that has completed its run has ended."""
        names = set()
        for run in self._experiment.runs if self.submissions.all else ():
            task = self.submissions.array_tasks.get(run.id)
            try:
                status = run.status()
            except (DamagedError, OSError):
                status = Status(state=State.DAMAGED)
            known = status.attempt and status.state in (State.RUNNING, State.COMPLETED)
            job = Attempt(run, status.attempt).job if known else None
            if job is not None and status.state == State.RUNNING:
                names.add(job.name)
            completed = job is not None and status.state == State.COMPLETED and (job.name, job.index)
            if task and (completed != task.key or run.age(run.status_file) < _SECONDS_TO_END):
                names.add(task.array.name)
        return names

    @property
    def no_answer(self) -> str:
        """Why the queue is unknown; empty if it is known, or nothing was ever submitted."""
        return self._no_answer if self.queued is None else ""

    def check_answer(self) -> None:
        """Check that the queue is known, if anything was ever submitted.

        Raises:
            SlurmError: it is unknown.
        """
        if self.queued is None:
            clusters = ", ".join(sorted({submission.cluster for submission in self.submissions.all}))
            raise SlurmError(
                f"the state of its jobs on the cluster {clusters} is unknown here: {self.no_answer}"
            )

    @functools.cached_property
    def accounted(self) -> Mapping[tuple[str, int], AccountedJob]:
        """Accounting records by name and array index; empty without accounting."""
        if not self.submissions.all or not self._here:
            return {}
        since = min(submission.time for submission in self.submissions.all)
        return slurm.accounted_jobs(self.submissions.job_names, since=since)

    def is_over(self, job: Job, *, claimed: float) -> bool | None:
        """Whether SLURM no longer runs a job that claimed an attempt; None: it cannot say (`Scheduler`)."""
        if self.queued is None and not self._elsewhere:
            return False  # assume that it runs until SLURM answers again
        if self.queued is None or claimed < time.monotonic() - self._queried_at + CLOCK_MARGIN:
            return None  # it may have started after the query
        users = {submission.name: submission.user for submission in self.submissions.all}
        queued = self.queued.get((job.name, job.index))
        # Where jobs are private (PrivateData), SLURM does not list those of others.
        if queued is None and users.get(job.submission) != user_name():
            return None
        return queued is None or phase_of(queued.state) in (JobPhase.PENDING, JobPhase.ENDED)

    def run_status(self, run: Run, *, with_accounting: bool) -> RunStatus:
        """Status of one run."""
        # SLURM first: a job that has ended by then has written its last status.
        all_queued = self.queued
        status = current_status(run, scheduler=self)
        task = self.submissions.array_tasks.get(run.id)
        if task is None:
            return RunStatus(run=run, status=status)
        queued = (all_queued or {}).get(task.key)
        done = self.accounted.get(task.key) if with_accounting and queued is None else None
        job = Attempt(run, status.attempt).job if status.attempt else None
        unclaimed = None
        if all_queued is not None and queued is None:
            unclaimed = unclaimed_job(run, status, task, done)
        return RunStatus(
            run=run,
            status=status if unclaimed is None else unclaimed.applied_to(status),
            job_id=next((known.id for known in (queued, done, unclaimed, job) if known), ""),
            job_state=next((known.state for known in (queued, done) if known), ""),
            pending_reason=queued.reason if queued and phase_of(queued.state) is JobPhase.PENDING else "",
            nodes=next((known.nodes for known in (queued, done, job) if known and known.nodes), ""),
            site=task.submission.site,
            queued=queued,
            accounted=done,
            unclaimed=unclaimed,
            queue_known=all_queued is not None,
        )

    def run_statuses(self, *, with_accounting: bool) -> list[RunStatus]:
        """Status of every run, in the order of the cells; `damaged` where its files are not its own."""
        found = []
        for cell in self._experiment.cells:
            each = self.run_status(self._experiment.run(cell.id), with_accounting=with_accounting)
            # One that is running stays so: it can be cancelled, and is not removed.
            if each.status.state not in (State.RUNNING, *UNKNOWN) and (
                problem := config_problem(self._experiment, cell)
            ):
                state, reason = state_after(problem), printable(problem)
                each = replace(each, status=replace(each.status, state=state, reason=reason))
            found.append(each)
        return found


_HELD = re.compile("held|JobHoldMaxRequeue|^DependencyNeverSatisfied$", re.IGNORECASE)
"""SLURM's reasons of jobs that it does not start until somebody does something."""


def hold_notes(run_statuses: Sequence[RunStatus]) -> list[str]:
    """For each reason for which SLURM holds jobs until somebody does something, a line that says what."""
    held: dict[str, list[str]] = {}
    for each in run_statuses:
        if each.is_queued and _HELD.search(each.pending_reason):
            held.setdefault(each.pending_reason, []).append(each.job_id)
    notes = []
    for reason, ids in held.items():
        count = "1 run waits" if len(ids) == 1 else f"{len(ids)} runs wait"
        if reason == "DependencyNeverSatisfied":
            notes.append(f"{count} for a job that failed ({reason}): asyncpp cancel, then launch again")
            continue
        who = ", as an administrator" if "Admin" in reason else ""
        release = shlex.join(["scontrol", "release", *slurm.grouped(ids)])
        notes.append(f"{count} until released ({reason}){who}: {release}")
    return notes


_NEVER_STARTED = "53"
"""Signal that SLURM's accounting gives a job whose script it could not start."""


@dataclass(frozen=True, kw_only=True)
class UnclaimedJob:
    """A job that ended before it claimed its run, so that the run's own files do not mention it.

    Either it could not start (the interpreter is gone, `setup` failed, a node did not boot) or it was
    cancelled while pending. All that is known is its accounting record, if any, and its output.
    """

    id: str
    failed: bool
    """False if it was cancelled, or if nothing is known."""
    reason: str
    output: Path | None
    """Its output file, if it started."""

    def applied_to(self, status: Status) -> Status:
        """The run's status after this job."""
        if not self.failed:
            return Status(**vars(status) | {"reason": status.reason or self.reason})
        return Status(**vars(status) | {"state": State.FAILED, "cause": Cause.ERROR, "reason": self.reason})


def output_file(task: ArrayTask) -> Path:
    """Output file of an array task, besides the ranks' logs."""
    return task.submission.folder / f"{task.array.id}_{task.index}.out"


def unclaimed_job(
    run: Run, status: Status, task: ArrayTask, accounted: AccountedJob | None
) -> UnclaimedJob | None:
    """The latest job of a run, if it ended before it claimed the run; else None.

    Args:
        run: the run.
        status: its status from its own files.
        task: the array task, no longer in SLURM's queue.
        accounted: its accounting record.
    """
    submitted = task.submission.state == "submitted" and task.array.id
    if not submitted or status.state in (State.COMPLETED, State.RUNNING, *UNKNOWN):
        return None
    job = Attempt(run, status.attempt).job if status.attempt else None
    claimed = job is not None and (job.name, job.index) == task.key
    if claimed or _claimed_later(run, status, task):
        return None
    file = output_file(task)
    output = file if file.exists() else None
    job_id = f"{task.array.id}_{task.index}"
    state = accounted.state if accounted is not None else ""
    if state == "CANCELLED" or (output is None and not state):
        how = "was cancelled before the run began" if state else "never started (reason unknown)"
        return UnclaimedJob(id=job_id, failed=False, reason=f"its job {job_id} {how}", output=output)
    by_slurm = f" ({state}{_how_it_ended(accounted.exit_code)})" if accounted is not None else ""
    last = tail(output)[-1:] if output is not None else []
    said = f": {last[0]}" if last else ""
    see = f" (submissions/{file.parent.name}/{file.name})" if output is not None else ""
    reason = f"its job {job_id} ended before the run began{by_slurm}{said}{see}"
    return UnclaimedJob(id=job_id, failed=True, reason=reason, output=output)


def _claimed_later(run: Run, status: Status, task: ArrayTask) -> bool:
    """Whether the run's latest attempt was claimed after the submission, by the file server's clock."""
    try:
        claimed = modified(Attempt(run, status.attempt).file(Claimed))
        return claimed > modified(task.submission.folder / task.array.file)
    except FileNotFoundError:
        return False


def _how_it_ended(exit_code: str) -> str:
    """SLURM's exit code of a job, `CODE:SIGNAL`, in words."""
    code, _, signal = exit_code.partition(":")
    if signal == _NEVER_STARTED:
        return ": SLURM could not enter its folder or write its output there; was the experiment moved?"
    return f", signal {signal}" if code == "0" and signal not in ("", "0") else f", exit code {code}"


def status_records(experiment: Experiment, run_statuses: Iterable[RunStatus]) -> list[dict[str, Any]]:
    """A record for each run: its id, its axes (a mapping), its status, and its job on a cluster."""
    axes = {cell.id: cell.axes for cell in experiment.cells}
    of_job = ("site", "job_id", "job_state", "pending_reason", "queue_known", "nodes", "error_lines")
    records = []
    for each in run_statuses:
        cost = cost_of_run(each.run, each.status)
        record = {"id": each.run.id, "axes": axes[each.run.id], **asdict(each.status)}
        record |= {"saved_step": each.run.saved_step, **{name: getattr(each, name) for name in of_job}}
        record |= asdict(cost) if cost else dict.fromkeys(("gpu_hours", "core_hours"))
        records.append(record | {"continues": _continues(each.run)})
    return records


def _continues(run: Run) -> dict[str, Any] | None:
    """The run that it continues (`asyncpp extend`); None for a run from the beginning."""
    try:
        lineage = run.lineage()
    except DamagedError:
        return None
    if lineage is None:
        return None
    return {key: value for key, value in to_builtins(lineage).items() if key != "format"}
