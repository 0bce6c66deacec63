"""Jobs that ended before they claimed their run, so that the run's own files do not mention them.

Either the job could not start (the interpreter is gone, `setup` failed, a node did not boot) or it was
cancelled while pending. All that is known is its accounting record, if any, and its output.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncpp_cli.launch.slurm.client import AccountedJob
from asyncpp_cli.launch.slurm.submissions import ArrayTask
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.outcome import tail
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import Cause, State, Status

_NEVER_STARTED = "53"
"""Signal that SLURM's accounting gives a job whose script it could not start."""


@dataclass(frozen=True, kw_only=True)
class UnclaimedJob:
    """A job that ended before it claimed its run."""

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
    if not submitted or status.state in (State.COMPLETED, State.RUNNING):
        return None
    job = Attempt(run, status.attempt).job if status.attempt else None
    claimed = job is not None and (job.name, job.index) == task.key
    if claimed or (status.started or 0.0) > task.submission.time:
        return None
    file = output_file(task)
    output = file if file.exists() else None
    job_id = f"{task.array.id}_{task.index}"
    state = accounted.state if accounted is not None else ""
    if state == "CANCELLED" or (output is None and not state):
        how = "was cancelled before the run began" if state else "ended before it began: why is unknown"
        return UnclaimedJob(id=job_id, failed=False, reason=f"its job {job_id} {how}", output=output)
    by_slurm = f" ({state}{_how_it_ended(accounted.exit_code)})" if accounted is not None else ""
    last = tail(output)[-1:] if output is not None else []
    said = f": {last[0]}" if last else ""
    see = f" (submissions/{file.parent.name}/{file.name})" if output is not None else ""
    reason = f"its job {job_id} ended before the run began{by_slurm}{said}{see}"
    return UnclaimedJob(id=job_id, failed=True, reason=reason, output=output)


def _how_it_ended(exit_code: str) -> str:
    """SLURM's exit code of a job, `CODE:SIGNAL`, in words."""
    code, _, signal = exit_code.partition(":")
    if signal == _NEVER_STARTED:
        return ": SLURM could not enter its folder or write its output there; was the experiment moved?"
    return f", signal {signal}" if code == "0" and signal not in ("", "0") else f", exit code {code}"
