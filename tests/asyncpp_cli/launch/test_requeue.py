"""Putting a job back into the queue, which ends who does it. SLURM's commands are scripts here."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.report_experiment import ExperimentFolder, settings

from asyncpp_cli.launch.job import array_task
from asyncpp_cli.launch.submission.arrays import ArrayManifest, JobShape
from asyncpp_cli.runs.attempts.files import Job
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.status import Cause, State, Status
from asyncpp_cli.slurm import client as slurm
from stages.liveness.stop_signal import RESUMABLE

JOB = Job(cluster="c", name="a", index=0, id="7_0", restart=0, nodes="n1", submission="s")
TABLE = ArrayManifest(
    name="a", submission="s", cluster="c", replay=True, retries=1, signal_lead=45,
    network_interface=None, srun_flags=[], site_settings={}, code="", software={},
    shape=JobShape(nodes=1, tasks=1, tasks_per_node=1, cpus_per_task=1, gpus_per_node=0), rows=[],
)  # fmt: skip
STOPPED = Status(state=State.INTERRUPTED, cause=Cause.STOPPED, attempt=1)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of `scontrol` and `squeue`. No longer than a look is the end waited for."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(array_task, "_SECONDS_TO_BE_ENDED", 0.0)
    return tmp_path


def script(file: Path, *lines: str) -> None:
    file.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    file.chmod(0o755)


def test_the_command_outlives_the_signal_that_it_brings_about(commands: Path) -> None:
    script(commands / "scontrol", "kill -TERM $$", 'echo heard > "$0.answer"')
    slurm.requeue("7_0")
    assert (commands / "scontrol.answer").exists()


@pytest.mark.parametrize(
    ("state", "said"),
    [("PENDING", "queued again"), ("COMPLETING", "queued again"), ("RUNNING", "not queued again (scontrol:")],
)
def test_a_job_whose_requeueing_was_not_acknowledged(
    commands: Path, capfd: pytest.CaptureFixture[str], state: str, said: str
) -> None:
    asked = commands / "asked"
    script(commands / "scontrol", f"touch {asked}", "echo Socket timed out >&2", "exit 1")
    script(commands / "squeue", f"test -e {asked} && s={state} || s=RUNNING", 'echo "7|7_0|$s|N/A"')
    made = ExperimentFolder(commands / "experiment")
    made.add(settings("1f1b", "muon"))
    experiment = open_experiment(made.folder)
    assert array_task._requeue(STOPPED, experiment, experiment.runs[0], TABLE, JOB) == RESUMABLE
    printed = capfd.readouterr().out.strip().splitlines()[-1]
    assert printed.partition(" ")[2].partition(" ")[2].startswith(said)
