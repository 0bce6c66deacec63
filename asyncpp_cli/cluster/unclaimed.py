"""A job that ended before it claimed its run: the run's own files say nothing of it.

It could not begin (the interpreter is gone, `setup` failed, a node did not boot), or it was cancelled while
it waited. What is known is SLURM's word, if there is accounting, and what the job printed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncpp_cli.cluster.attempts import Attempt
from asyncpp_cli.cluster.outcome import last_lines_of
from asyncpp_cli.cluster.slurm import AccountedJob
from asyncpp_cli.cluster.submissions import Place
from asyncpp_cli.runs import Cause, Run, State, Status


@dataclass(frozen=True, kw_only=True)
class Unclaimed:
    """How such a job ended."""

    id: str
    failed: bool
    """Not known to have been cancelled."""
    reason: str
    output: Path | None
    """What it printed, if it began."""

    def over(self, status: Status) -> Status:
        """The run's status, where this is the last that is known of it."""
        if not self.failed:
            return Status(**vars(status) | {"reason": status.reason or self.reason})
        return Status(**vars(status) | {"state": State.FAILED, "cause": Cause.ERROR, "reason": self.reason})


def output_file(place: Place) -> Path:
    """Where a job prints what is not a rank's."""
    return place.submission.folder / f"{place.array.id}_{place.index}.out"


def ended_unclaimed(
    run: Run, status: Status, place: Place, accounted: AccountedJob | None
) -> Unclaimed | None:
    """How the last job of a run ended, if it did so before it claimed the run.

    Args:
        run: which.
        status: by its own files.
        place: of the job, which SLURM has no more.
        accounted: what the accounting says of it.
    """
    submitted = place.submission.state == "submitted" and place.array.id
    if not submitted or status.state in (State.COMPLETED, State.RUNNING):
        return None
    job = Attempt(run, status.attempt).job if status.attempt else None
    claimed = job is not None and (job.name, job.index) == place.key
    if claimed or (status.started or 0.0) > place.submission.time:
        return None
    file = output_file(place)
    output = file if file.exists() else None
    job_id = f"{place.array.id}_{place.index}"
    word = accounted.state if accounted is not None else ""
    if word == "CANCELLED" or (output is None and not word):
        how = "was cancelled before the run began" if word else "ended before it began: why is unknown"
        return Unclaimed(id=job_id, failed=False, reason=f"its job {job_id} {how}", output=output)
    code = f", exit code {accounted.exit_code.partition(':')[0]}" if accounted is not None else ""
    by_slurm = f" ({word}{code})" if word else ""
    last = last_lines_of(output)[-1:] if output is not None else []
    said = f": {last[0]}" if last else ""
    see = f" (submissions/{file.parent.name}/{file.name})" if output is not None else ""
    reason = f"its job {job_id} ended before the run began{by_slurm}{said}{see}"
    return Unclaimed(id=job_id, failed=True, reason=reason, output=output)
