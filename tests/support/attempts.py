"""Attempts that tests claim themselves, and submissions of their runs."""

from __future__ import annotations

from typing import Any

from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.claims import claim
from asyncpp_cli.runs.attempts.settle import end_rank
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.processes import user_name
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.slurm.submissions import Submission, SubmittedArray, new_folder, write_submission


def claimed(run: Run, **how: Any) -> Attempt:
    """The next attempt at a run, claimed by this process (`claim`)."""
    attempt = claim(run, **how)
    assert attempt is not None
    return attempt


def fall(attempt: Attempt, rank: int, code: int, *, stopped: bool = False) -> None:
    """A rank ends with an exit code, or by a signal if that is negative."""
    by_signal = {"code": None, "signal_number": -code} if code < 0 else {"code": code, "signal_number": None}
    end_rank(attempt, rank, **by_signal, stopped=stopped)


def submitted(
    experiment: Experiment, *, state: str = "submitted", site: str = "s", **runs: tuple[str, ...]
) -> str:
    """Record a submission to the cluster `c`; its name.

    Args:
        experiment: the experiment.
        state: of the submission.
        site: its profile.
        runs: ids of the runs of each array, by the array's name.
    """
    folder = new_folder(experiment)
    arrays = tuple(
        SubmittedArray(name=name, file=f"{name}.json", runs=ids, shape="", id=str(7 + number))
        for number, (name, ids) in enumerate(runs.items())
    )
    write_submission(
        Submission(
            folder=folder, path=str(folder.absolute()), time=0.0, site=site, cluster="c",
            user=user_name(), host="h", state=state,
            interpreter="python", software={}, code="c0de", arrays=arrays,
        )
    )  # fmt: skip
    return folder.name
