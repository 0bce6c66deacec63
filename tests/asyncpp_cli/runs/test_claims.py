"""Who may run a run, and with which code: what holds on any filesystem and whatever is edited meanwhile."""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from support.attempts import claimed, submitted
from support.command_line import ran
from support.report_experiment import ExperimentFolder, settings

from asyncpp_cli.launch.common import snapshot
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.claims import claim
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.processes import this_process
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status
from asyncpp_cli.slurm.submissions import read_submissions

TOGETHER = 8


def test_of_many_who_claim_at_once_without_locks_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for number in range(20):
        run = Run(tmp_path / str(number))
        run.folder.mkdir()
        start = Barrier(TOGETHER)

        def take(run: Run = run, start: Barrier = start) -> Attempt | None:
            start.wait()
            return claim(run, processes=1, replay=True, steps=1)

        with ThreadPoolExecutor(TOGETHER) as pool:
            taken = [future.result() for future in [pool.submit(take) for _ in range(TOGETHER)]]
        assert [attempt.number for attempt in taken if attempt is not None] == [1]
        assert (run.status().state, run.status().attempt) == (State.RUNNING, 1)
        assert [folder.name for folder in run.attempts.iterdir()] == ["1"]


@pytest.mark.slow
def test_a_claim_that_was_killed_half_way_does_not_stand_in_the_way(tmp_path: Path) -> None:
    run = Run(tmp_path)
    code = (
        "import os, sys; from pathlib import Path; from asyncpp_cli.runs.attempts import claims; "
        "claims.Run.write_status = lambda *_: os._exit(9); "
        "claims.claim(claims.Run(Path(sys.argv[1])), processes=1, replay=True, steps=1)"
    )
    assert ran(sys.executable, "-c", code, tmp_path).code == 9
    assert (run.status().state, run.status().attempt) == (State.RUNNING, 1)
    assert (run.attempts / "1").is_dir()
    attempt = claimed(run, processes=1, replay=True, steps=1)
    assert attempt.number == 2


@pytest.mark.slow
def test_the_copy_of_the_code_is_what_runs_and_is_made_once(tmp_path: Path) -> None:
    copied = snapshot.copy_code(tmp_path / "code")
    assert copied.name == snapshot.code_hash()
    assert snapshot.copy_code(tmp_path / "code") == copied
    ask = (
        "import json, asyncpp_cli, stages; from asyncpp_cli.launch.common.snapshot import code_hash; "
        "print(json.dumps([asyncpp_cli.__file__, stages.__file__, code_hash()]))"
    )
    environment = {"PYTHONPATH": f"code/{copied.name}", "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    asked = ran(sys.executable, "-c", ask, cwd=tmp_path, env=environment)
    ours, stages, digest = json.loads(asked.output)
    assert Path(ours).is_relative_to(copied)
    assert Path(stages).is_relative_to(copied)
    assert digest == copied.name


def test_other_software_than_at_the_submission_is_named() -> None:
    assert snapshot.difference(snapshot.software()) == ""
    before = snapshot.software() | {"torch": "1.0"}
    assert snapshot.difference(before) == f"torch was 1.0 and is {snapshot.software()['torch']}"


def test_an_attempt_that_has_not_begun_to_train_has_the_steps_that_are_saved(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in (4, 12):
        (run.checkpoints / f"step-{step}").mkdir(parents=True)
    claimed(run, processes=1, replay=True, steps=20)
    assert (run.status().step, run.status().steps) == (12, 20)


def test_a_copy_of_a_run_that_runs_does_not_run(tmp_path: Path) -> None:
    """Who ended the copy would end the processes of the run itself. A folder that was moved is no copy."""
    run, copy = Run(tmp_path / "runs" / "a"), Run(tmp_path / "copy" / "a")
    run.folder.mkdir(parents=True)
    attempt = claimed(run, processes=1, replay=True, steps=1)
    attempt.record_start(0, this_process())
    shutil.copytree(run.folder.parent, copy.folder.parent)
    (tmp_path / "link").symlink_to("runs")
    assert current_status(Run(tmp_path / "link" / "a")).state == State.RUNNING
    status = current_status(copy)
    assert (status.state, status.reason) == (
        State.FAILED,
        "rank 0 was running when the folder was copied",
    )
    assert current_status(run).state == State.RUNNING
    run.folder.parent.rename(tmp_path / "moved")
    assert current_status(Run(tmp_path / "moved" / "a")).state == State.RUNNING


def test_jobs_of_an_experiment_are_not_those_of_its_copy(tmp_path: Path) -> None:
    made = ExperimentFolder(tmp_path / "e")
    made.add(settings("1f1b", "muon"), status=Status(state=State.PENDING))
    experiment = open_experiment(made.folder)
    submitted(experiment, a=(experiment.runs[0].id,))
    shutil.copytree(made.folder, tmp_path / "copy")
    for folder, submissions in ((tmp_path / "e", 1), (tmp_path / "copy", 0)):
        assert len(read_submissions(open_experiment(folder)).all) == submissions
    made.folder.rename(tmp_path / "moved")
    assert len(read_submissions(open_experiment(tmp_path / "moved")).all) == 1
