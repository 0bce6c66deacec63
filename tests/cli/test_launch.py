"""Runs launched for real: processes, signals, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from command_line import asyncpp as in_process

from asyncpp_cli.cluster.attempts import Attempt
from asyncpp_cli.cluster.processes import ProcessId, end, is_gone
from asyncpp_cli.runs import Experiment, Run, State, open_experiment
from asyncpp_cli.template_file import load, text_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")

TINY = [
    "model=micro",
    "data.context=16",
    "train.microbatch_size=1",
    "train.eval_microbatches=1",
    "train.eval_interval=500",
]
HOURS = 1_000_000
"""Steps of a run that does not end by itself."""


def asyncpp(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = [sys.executable, "-m", "asyncpp_cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


class Launched:
    """`asyncpp launch`, running as the leader of a process group, as shells have it."""

    def __init__(self, folder: Path, arguments: Sequence[str], *, output: Path) -> None:
        self.folder = folder
        # Files, not pipes: the runs inherit them, and a pipe stays open until the last of them ends.
        self._output, self._errors = output.with_suffix(".out"), output.with_suffix(".err")
        # -P, as for the console script: the working folder is no place to import from.
        command = [sys.executable, "-P", "-m", "asyncpp_cli", "launch", str(folder), *arguments]
        with self._output.open("w") as out, self._errors.open("w") as err:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=err, start_new_session=True, cwd=output.parent
            )

    def finish(self, *, seconds: float) -> int:
        """Wait for its end. The exit code."""
        return self.process.wait(timeout=seconds)

    def ctrl_c(self) -> None:
        """What a terminal does: it tells the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def errors(self) -> str:
        return self._errors.read_text()


StartLaunch = Callable[..., Launched]


@pytest.fixture
def start_launch(tmp_path: Path) -> Iterator[StartLaunch]:
    """Starts `asyncpp launch`. Nothing of it outlives the test."""
    started: list[Launched] = []

    def start(folder: Path, *arguments: str) -> Launched:
        started.append(Launched(folder, arguments, output=tmp_path / f"launch-{len(started)}"))
        return started[-1]

    yield start
    for launched in started:
        launched.process.kill()
        launched.finish(seconds=250)
        for run in open_experiment(launched.folder).runs:
            for process in processes_of(run):
                end(process, signal.SIGKILL)


def sweep(folder: Path, *changes: str) -> Experiment:
    """The quickstart's matrix with tiny runs, changed."""
    made = asyncpp("sweep", "quickstart", *TINY, *changes, "--out", folder)
    assert made.returncode == 0, made.stderr
    return open_experiment(folder)


def wait_for(condition: Callable[[], bool], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def threads_of(process: ProcessId) -> int:
    tasks = Path(f"/proc/{process.pid}/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0


def is_training(run: Run) -> bool:
    status = run.status()
    return status.state == State.RUNNING and status.step > 0


def processes_of(run: Run) -> list[ProcessId]:
    attempt = Attempt(run, run.status().attempt)
    return [process for rank in (0, 1) for process in attempt.processes(rank)]


def starts(run: Run) -> int:
    return sum(json.loads(line)["kind"] == "start" for line in run.metrics_file.read_text().splitlines())


def weights(run: Run) -> str:
    return str(run.metrics()[-1]["weights_sha256"])


@pytest.mark.timeout(1500)
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
    assert asyncpp("launch", experiment.folder).returncode == 0
    assert [run.status().attempt for run in experiment.runs] == [1, 1]

    replayed = sweep(tmp_path / "replayed", *changes, "error_feedback=true")
    assert asyncpp("launch", replayed.folder, "--replay").returncode == 0
    (run,) = replayed.runs
    assert weights(run) == weights(experiment.run(run.id))


@pytest.mark.timeout(1500)
def test_a_killed_rank_fails_its_run_alone_and_ctrl_c_interrupts(
    tmp_path: Path, start_launch: StartLaunch
) -> None:
    experiment = sweep(
        tmp_path / "e",
        "matrix={schedule: 2bw, optimizer: adamw}",
        f"zip={{error_feedback: [false, true], train.steps: [{HOURS}, 3]}}",
        "exclude=[]",
    )
    long, short = experiment.runs
    launched = start_launch(experiment.folder, "--max-parallel", "2")
    wait_for(lambda: is_training(long), seconds=250)
    os.kill(long.status().pids[1], signal.SIGKILL)
    assert launched.finish(seconds=250) == 1, launched.errors
    failed = long.status()
    assert failed.state == State.FAILED
    assert "rank 1 was killed by SIGKILL" in failed.reason
    assert failed.reason in launched.errors
    assert short.status().state == State.COMPLETED

    launched = start_launch(experiment.folder, "--max-parallel", "3")
    wait_for(lambda: is_training(long), seconds=250)
    assert long.status().attempt == 2
    processes = processes_of(long)
    launched.ctrl_c()
    assert launched.finish(seconds=250) == 130, launched.errors
    assert f"To go on: asyncpp launch {experiment.folder} --max-parallel 3\n" in launched.errors
    assert long.status().state == State.INTERRUPTED
    assert long.status().reason == "Ctrl-C in asyncpp launch"
    assert short.status().attempt == 1
    wait_for(lambda: all(is_gone(process) for process in processes), seconds=250)


@pytest.mark.timeout(1500)
def test_a_killed_launch_leaves_its_run_going_which_the_next_leaves_alone(
    tmp_path: Path, start_launch: StartLaunch
) -> None:
    experiment = sweep(
        tmp_path / "e",
        "matrix={schedule: 2bw, optimizer: adamw}",
        f"train.steps={HOURS}",
        "exclude=[]",
    )
    (run,) = experiment.runs
    launched = start_launch(experiment.folder)
    wait_for(lambda: is_training(run), seconds=250)
    launched.process.kill()
    launched.finish(seconds=250)
    before = run.status()

    other = start_launch(experiment.folder)
    wait_for(lambda: "going on" in other.errors, seconds=250)
    other.ctrl_c()
    assert other.finish(seconds=250) == 130, other.errors
    assert (run.status().attempt, run.status().pids) == (1, before.pids)
    assert run.status().state == State.RUNNING

    supervisor = Attempt(run, 1).processes(0)[1]
    os.kill(supervisor.pid, signal.SIGKILL)
    wait_for(lambda: all(is_gone(process) for process in processes_of(run)), seconds=250)
    shown = asyncpp("status", experiment.folder, "--json")
    (status,) = json.loads(shown.stdout)
    assert status["state"] == "failed"
    assert "rank 0 vanished" in status["reason"]


@pytest.mark.timeout(1500)
def test_a_rank_that_saved_before_its_supervisor_looked_says_why(
    tmp_path: Path, start_launch: StartLaunch
) -> None:
    """A cluster signals both at once; which of them acts first is chance."""
    experiment = sweep(
        tmp_path / "e", "matrix={schedule: 2bw, optimizer: adamw}", "exclude=[]", f"train.steps={HOURS}"
    )
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


@pytest.mark.timeout(1500)
def test_train_runs_under_torchrun_and_alone_in_replay_but_never_twice(tmp_path: Path) -> None:
    experiment = sweep(tmp_path / "e", "matrix.schedule=2bw", "matrix.optimizer=muon", "train.steps=2")
    under_torchrun, alone = experiment.runs
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "asyncpp_cli"]
    started = [*torchrun, "train", str(under_torchrun.folder)]
    # The folder it is started from comes first where Python looks, and has packages of the user's own.
    for name in ("optimizers", "stages", "schedules"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        (tmp_path / "mine" / name / "__init__.py").write_text("raise SystemExit('the wrong package')")
    done = subprocess.run(
        started, capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path / "mine"
    )
    assert done.returncode == 0, done.stderr
    assert asyncpp("train", alone.folder, "--replay").returncode == 0
    for run in experiment.runs:
        assert (run.status().state, run.status().attempt, run.status().step) == (State.COMPLETED, 1, 2)
        assert starts(run) == 1
    again = asyncpp("train", alone.folder, "--replay")
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "completed" in again.stderr


@pytest.mark.timeout(1500)
def test_quickstart_sweeps_launches_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = [*TINY, "matrix={schedule: 2bw, optimizer: adamw}", "exclude=[]", "train.steps=2"]
    template = tmp_path / "tiny.yaml"
    template.write_text(text_of(load("quickstart", changes)))
    monkeypatch.setattr("asyncpp_cli.commands.quickstart.TEMPLATE", str(template))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "asyncpp-quickstart").mkdir()
    ended = in_process("quickstart")
    assert ended.code == 0, ended.errors
    assert "1 of 1 runs completed in asyncpp-quickstart-2" in ended.errors
    assert "asyncpp sweep" in ended.errors
    assert "2bw" in ended.output
    assert in_process("quickstart", "--out", "asyncpp-quickstart-2").code == 0
    assert [run.status().attempt for run in open_experiment(Path("asyncpp-quickstart-2")).runs] == [1]
