"""Every task of an array goes on after what SLURM does to it, the one that carries the array's own id too."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.cluster_runs import (
    ONE_RUN,
    hurry,
    launch,
    outcomes,
    preempt_all,
    scontrol,
    site_file,
    squeue,
    starts,
    sweep,
    wait_for,
)

from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import Outcome
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State


def test_all_tasks_resume_after_a_preemption_and_a_time_limit(slurm_conf: Path, tmp_path: Path) -> None:
    # More steps than any attempt here takes.
    often = ["train.checkpoint_interval=50", "train.steps=100000", "site.grace=15"]
    experiment = sweep(tmp_path / "e", *ONE_RUN, *often, "matrix.seed=[0,1,2]")
    runs = experiment.runs
    launch(experiment.folder, "--replay", site=site_file(tmp_path, signal_lead=50, retries=0))
    wait_for(lambda: all(has_step(run) for run in runs), seconds=150, why=lambda: told(experiment))
    ids = [line.split("|") for line in squeue("%A", "%F", "%K")]
    (array,) = {array for _, array, _ in ids}
    assert [index for raw, _, index in ids if raw == array], "no task has the array's own id"

    preempt_all()
    wait_for(lambda: all(outcomes(run) for run in runs), seconds=100, why=lambda: told(experiment))
    assert [outcomes(run) for run in runs] == [[("interrupted", "stopped")]] * 3, told(experiment)

    # The shortest limit that SLURM knows, for those that go on.
    wait_for(lambda: queued_again(array) == {"0", "1", "2"}, seconds=60, why=squeue)
    scontrol("update", f"JobId={array}", "TimeLimit=1")
    wait_for(lambda: going_on(2, runs), seconds=200, why=lambda: told(experiment))
    assert [outcomes(run)[1] for run in runs] == [("interrupted", "time-limit")] * 3, told(experiment)
    wait_for(lambda: all_resume(array, runs), seconds=250, why=lambda: told(experiment))


def has_step(run: Run) -> bool:
    return run.status().step > 0


def queued_again(array: str) -> set[str]:
    """Indices of the tasks that wait in the queue."""
    found = [line.split("|") for line in squeue("%F", "%K", "%T")]
    return {index for job, index, state in found if job == array and state == "PENDING"}


def going_on(times: int, runs: tuple[Run, ...]) -> bool:
    """Whether so many attempts at each run have ended."""
    hurry()
    return all(len(outcomes(run)) >= times for run in runs)


def all_resume(array: str, runs: tuple[Run, ...]) -> bool:
    """Whether later attempts have trained beyond what those before them saved, once they have the time."""
    # SLURM leaves out a task that it is queueing again, so until all have resumed the limit is set again.
    subprocess.run(["scontrol", "update", f"JobId={array}", "TimeLimit=60"], timeout=60, check=False)
    return all(has_resumed(run) for run in runs)


def has_resumed(run: Run) -> bool:
    hurry()
    status = run.status()
    return status.state is State.RUNNING and status.attempt >= 3 and 0 < starts(run)[-1][1] < status.step


def told(experiment: Experiment) -> object:
    """How it stands, for people."""
    reasons = [
        [Attempt(run, number).read(Outcome) for number in range(1, run.status().attempt + 1)]
        for run in experiment.runs
    ]
    printed = [file.read_text()[-1500:] for file in sorted(experiment.submissions.glob("*/*.out"))]
    return squeue(), reasons, printed
