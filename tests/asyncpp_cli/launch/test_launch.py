"""Runs launched for real: processes, signals, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
from support.command_line import ASYNCPP, asyncpp, ran, refusal, succeeded
from support.launches import (
    HOURS,
    ONE,
    TINY,
    StartLaunch,
    is_training,
    launch_in_this_process,
    processes_of,
    rows_of,
    sweep,
    wait_for,
    weights,
)
from support.privileges import with_loopback
from support.rows import plain

from asyncpp_cli.base.import_path import import_path, import_path_in_bash
from asyncpp_cli.experiment.template import load, text_of
from asyncpp_cli.report.load.measure import measure
from asyncpp_cli.report.load.metrics_rows import read_metrics
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.repair import repair_run
from asyncpp_cli.runs.experiment_folder import Experiment, open_experiment
from asyncpp_cli.runs.processes import ProcessId, is_gone
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import Cause, State


def starts(run: Run) -> int:
    return sum(json.loads(line)["kind"] == "start" for line in run.metrics_file.read_text().splitlines())


@pytest.mark.slow
def test_two_launches_at_once_share_the_work_and_replay_gives_the_same_weights(
    tmp_path: Path, start_launch: StartLaunch
) -> None:
    changes = ["matrix.schedule=2bw", "matrix.optimizer=adamw", "train.steps=3"]
    experiment = sweep(tmp_path / "a b;'c\"$(touch x)", *changes)
    (tmp_path / "optimizers").mkdir()
    (tmp_path / "optimizers" / "__init__.py").write_text("raise ImportError('a package of the user')")
    first, second = start_launch(experiment.folder), start_launch(experiment.folder)
    for launched in (first, second):
        assert launched.finish(seconds=250) == 0, launched.errors
        assert launched.output == ""
    for run in experiment.runs:
        assert run.status().state == State.COMPLETED
        assert run.status().attempt == 1
        assert run.status().step == 3
        assert starts(run) == 1
    succeeded("launch", experiment.folder)
    assert [run.status().attempt for run in experiment.runs] == [1, 1]

    replayed = sweep(tmp_path / "replayed", *changes, "error_feedback=true")
    (run,) = replayed.runs
    succeeded("train", run.folder, "--replay")
    assert weights(run) == weights(experiment.run(run.id))


@pytest.mark.slow
def test_a_killed_rank_fails_its_run_alone(tmp_path: Path, start_launch: StartLaunch) -> None:
    zipped = f"zip={{schedule: [2bw, fsdp, 2bw], train.steps: [{HOURS}, {HOURS}, 3]}}"
    experiment = sweep(tmp_path / "e", "matrix={optimizer: adamw}", "exclude=[]", zipped)
    *both, short = experiment.runs
    launched = start_launch(experiment.folder, "--max-parallel", "3")
    for long in both:
        wait_for(partial(is_training, long), seconds=250)
        os.kill(long.status().pids[1], signal.SIGKILL)
    assert launched.finish(seconds=250) == 1, launched.errors
    for long in both:
        failed = long.status()
        assert failed.state == State.FAILED
        assert "rank 1 was killed by SIGKILL" in failed.reason
        assert f"{long.id}: {failed.reason}" in launched.errors
    assert short.status().state == State.COMPLETED


@pytest.mark.slow
def test_a_killed_launch_leaves_its_run_going_which_the_next_leaves_alone(
    tmp_path: Path, start_launch: StartLaunch
) -> None:
    experiment = sweep(tmp_path / "e", *ONE, f"train.steps={HOURS}")
    (run,) = experiment.runs
    launched = start_launch(experiment.folder)
    wait_for(lambda: is_training(run), seconds=250)
    launched.process.kill()
    launched.finish(seconds=250)
    before = run.status()

    other = start_launch(experiment.folder)
    wait_for(lambda: "running      (on " in other.errors, seconds=250)
    other.ctrl_c()
    assert other.finish(seconds=250) == 130, other.errors
    assert (run.status().attempt, run.status().pids) == (1, before.pids)
    assert run.status().state == State.RUNNING

    supervisor = Attempt(run, 1).processes(0)[1]
    os.kill(supervisor.pid, signal.SIGKILL)
    wait_for(lambda: all(is_gone(process) for process in processes_of(run)), seconds=250)
    shown = asyncpp("status", experiment.folder, "--json")
    (status,) = json.loads(shown.output)
    assert status["state"] == "failed"
    assert "rank 0 vanished" in status["reason"]


@pytest.mark.slow
def test_a_rank_that_saved_before_its_supervisor_looked_says_why(
    tmp_path: Path, start_launch: StartLaunch
) -> None:
    """A cluster signals both at once; which of them acts first is chance."""
    experiment = sweep(tmp_path / "e", *ONE, f"train.steps={HOURS}")
    (run,) = experiment.runs
    launched = start_launch(experiment.folder, "--replay")
    wait_for(lambda: is_training(run), seconds=250)
    trainer, supervisor = Attempt(run, 1).processes(0)
    os.kill(supervisor.pid, signal.SIGSTOP)
    for process in (supervisor, trainer):
        os.kill(process.pid, signal.SIGUSR2)
    # Its first thread is seen as gone while others still end, and no parent is told of it until they have.
    wait_for(lambda: is_gone(trainer) and threads_of(trainer) <= 1, seconds=250)
    os.kill(supervisor.pid, signal.SIGCONT)
    assert launched.finish(seconds=250) == 1, launched.errors
    status = run.status()
    assert (status.state, status.reason) == (State.INTERRUPTED, "rank 0 was told to end by SIGUSR2")


@pytest.mark.slow
def test_train_runs_under_torchrun_and_alone_in_replay_but_never_twice(tmp_path: Path) -> None:
    # In shards, and a pipeline.
    matrix = ["matrix={schedule: [fsdp, 2bw], optimizer: muon}", "exclude=[]"]
    experiment = sweep(tmp_path / "e", *matrix, "train.steps=4", "train.eval_interval=2")
    under_torchrun, alone = experiment.runs
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "asyncpp_cli"]
    # The folder it is started from comes first where Python looks, and has packages of the user's own.
    for name in ("optimizers", "stages", "schedules"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        (tmp_path / "mine" / name / "__init__.py").write_text("raise SystemExit('the wrong package')")
    there = {"cwd": tmp_path / "mine", "env": os.environ | {"COLUMNS": "80"}}
    done = ran(*torchrun, "train", under_torchrun.folder, **there)
    assert done.code == 0, done.errors
    # One process prints the progress, not both.
    beginning, *between, end = done.output.splitlines()
    assert beginning.startswith("beginning of 4: ")
    assert beginning.endswith(" parameters, on cpu")
    assert between[0].startswith("step 1 of 4: training loss ")
    assert [line.partition(":")[0] for line in between if "validation" in line][-1] == "step 4"
    assert end == "completed: 4 steps"
    succeeded("train", alone.folder, "--replay")
    for run in experiment.runs:
        assert (run.status().state, run.status().attempt, run.status().step) == (State.COMPLETED, 1, 4)
        assert starts(run) == 1
    again = asyncpp("train", alone.folder, "--replay")
    assert (again.code, again.output) == (0, "")
    assert again.errors.endswith(" is completed: nothing is left to train\n")


@pytest.mark.slow
def test_quickstart_sweeps_launches_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = [*TINY, *ONE, "train.steps=2"]
    template = tmp_path / "tiny.yaml"
    template.write_text(text_of(load("quickstart", changes)))
    monkeypatch.setattr("asyncpp_cli.commands.runs.quickstart.TEMPLATE", str(template))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "asyncpp-quickstart").mkdir()
    ended = succeeded("quickstart")
    assert "1 of 1 runs completed in asyncpp-quickstart-2" in ended.errors
    assert "asyncpp sweep" in ended.errors
    assert "2bw" in ended.output
    succeeded("quickstart", "--out", "asyncpp-quickstart-2")
    assert [run.status().attempt for run in open_experiment(Path("asyncpp-quickstart-2")).runs] == [1]


@pytest.mark.slow
def test_ranks_meet_over_ipv6_alone_and_say_where_they_cannot_meet(tmp_path: Path) -> None:
    changes = [*ONE, "train.steps=2", "site.start_timeout=1000000"]
    [run], [replayed] = (sweep(tmp_path / name, *changes).runs for name in ("e", "replayed"))
    launch = [*ASYNCPP, "launch", run.folder.parents[1]]
    ended = ran(*with_loopback("down"), *launch)
    assert ended.code == 1
    [line] = [line for line in ended.errors.splitlines() if "RuntimeError" in line]
    assert "processes of this machine cannot connect to each other (127.0.0.1: Network is unreachable" in line
    assert ran(*with_loopback("IPv6 alone"), *launch).code == 0
    succeeded("train", replayed.folder, "--replay")
    assert weights(run) == weights(replayed)


def test_all_arms_of_a_seed_come_before_the_next_seed(tmp_path: Path) -> None:
    matrix = "matrix={schedule: [1f1b, 2bw], optimizer: adamw, seed: [3, 1]}"
    experiment = sweep(tmp_path / "e", matrix, "exclude=[]", "train.steps=1")
    axes = {cell.id: cell.axes for cell in experiment.cells}
    order = [(axes[run.id]["seed"], axes[run.id]["schedule"]) for run in experiment.runs_to_launch]
    assert order == [(3, "1f1b"), (3, "2bw"), (1, "1f1b"), (1, "2bw")]


ONE_RUN = ["matrix={schedule: 2bw, optimizer: muon}", "exclude=[]", "train.steps=9"]


def launched(experiment: Experiment, *options: str) -> tuple[State, int, int]:
    """Launch it; the state, step and attempt of its only run."""
    succeeded("launch", experiment.folder, "--replay", *options)
    (run,) = experiment.runs
    status = run.status()
    assert (status.cause, status.steps) == (Cause.NONE, 9)
    return status.state, status.step, status.attempt


@pytest.mark.slow
def test_paused_runs_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_in_this_process(monkeypatch)
    whole, paused = sweep(tmp_path / "whole", *ONE_RUN), sweep(tmp_path / "paused", *ONE_RUN)
    assert whole.cells == paused.cells
    launched(whole)
    assert launched(paused, "--until", "4") == (State.PAUSED, 4, 1)
    assert launched(paused, "--until", "4") == (State.PAUSED, 4, 1), "it is there already"
    assert launched(paused, "--until", "3") == (State.PAUSED, 4, 1), "it is beyond it"
    (run,) = paused.runs
    run.status_file.write_text("{")
    repair_run(run)
    assert (run.status().state, run.status().step) == (State.PAUSED, 4)
    (shown,) = json.loads(asyncpp("status", paused.folder, "--json").output)
    assert (shown["state"], shown["saved_step"], shown["reason"]) == ("paused", 4, "")
    assert [evaluation.step for evaluation in measure(read_metrics(run)).evaluations] == [4]
    succeeded("report", paused.folder)
    assert launched(paused) == (State.COMPLETED, 9, 2)
    assert all(row["load_per_core"] >= 0 for row in plain(run) if row["kind"] == "segment")
    for kind in ("step", "end"):
        assert rows_of(run, kind) == rows_of(whole.runs[0], kind)


def test_a_pause_that_would_change_the_numbers_is_refused(tmp_path: Path) -> None:
    changes = ["matrix={schedule: paci, optimizer: adamw}", "exclude=[]", "train.steps=9", "train.clip=stage"]
    experiment = sweep(tmp_path / "e", *changes)
    assert "train.eval_interval (500)" in refusal("launch", experiment.folder, "--replay", "--until", "4")
    (run,) = experiment.runs
    assert run.status().state == State.PENDING
    ended = asyncpp("launch", experiment.folder, "--until", "0")
    assert ended.code == 2


@pytest.mark.parametrize(
    ("inherited", "path"),
    [
        (None, "own"),
        ("", "own"),
        (":", "own"),
        (":::", "own"),
        ("/a b", "own:/a b"),
        (":/a", "own:/a"),
        ("/a:", "own:/a"),
        ("/a::/b:::$(c)", "own:/a:/b:$(c)"),
    ],
)
def test_empty_entries_are_dropped_here_and_in_a_job(
    inherited: str | None, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if inherited is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", inherited)
    assert import_path("own") == path
    script = "\n".join(["set -eu", *import_path_in_bash("own"), "printenv PYTHONPATH"])
    assert ran("bash", "-c", script).output == f"{path}\n"


@pytest.mark.slow
def test_ranks_import_nothing_from_the_working_folder(
    tmp_path: Path, start_launch: StartLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Read at the start of every Python process that finds it.
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    one = ["matrix.schedule=[1f1b]", "matrix.optimizer=[adamw]", "matrix.error_feedback=[false]"]
    experiment = sweep(tmp_path / "e", *one, "train.steps=2")
    launched = start_launch(experiment.folder, "--replay")
    assert launched.finish(seconds=250) == 0, launched.errors
    assert not (tmp_path / "imported").exists()


def threads_of(process: ProcessId) -> int:
    tasks = Path(f"/proc/{process.pid}/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0
