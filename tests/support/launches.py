"""`asyncpp launch` as a process, and the conditions that tests wait for."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from support.command_line import ASYNCPP, asyncpp, succeeded
from support.rows import plain

from asyncpp_cli.launch import dry_run, joining, start
from asyncpp_cli.launch.local_machine import Task
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.claims import claim
from asyncpp_cli.runs.attempts.files import Claimed, Outcome
from asyncpp_cli.runs.experiment_folder import Experiment, open_experiment
from asyncpp_cli.runs.processes import ProcessId
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status

TINY = [
    "model=micro",
    "data.context=16",
    "train.microbatch_size=1",
    "train.eval_microbatches=1",
    "train.eval_interval=500",
]
ONE = ["matrix={schedule: 2bw, optimizer: adamw}", "exclude=[]"]
"""One cell of the quickstart."""
LONG = [*ONE, "train.steps=400", "train.checkpoint_interval=100", "site.device=cpu"]
"""That cell, long enough to be killed on its way."""
HOUR = 3600.0
HOURS = 1_000_000
"""Number of steps of a run that lasts longer than any test."""


@contextmanager
def started_process(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that a failing test does not wait for, nor leave for the next."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


class Started:
    """`asyncpp`, running as the leader of a process group, as shells start it."""

    def __init__(self, *arguments: str | Path, output: Path) -> None:
        # Files, not pipes: runs inherit them, and a pipe stays open until the last run ends.
        self._output, self._errors = output.with_suffix(".out"), output.with_suffix(".err")
        command = [*ASYNCPP, *arguments]
        with self._output.open("w") as out, self._errors.open("w") as err:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=err, start_new_session=True, cwd=output.parent
            )

    def finish(self, *, seconds: float) -> int:
        """Wait for the end; returns the exit code."""
        return self.process.wait(timeout=seconds)

    def ctrl_c(self) -> None:
        """Send SIGINT to the process group, as a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def errors(self) -> str:
        return self._errors.read_text()


def unseen(statuses: Sequence[tuple[Run, Status]]) -> None:
    """Progress of a launcher that nobody looks at."""


class Launched(Started):
    """`asyncpp launch` of an experiment."""

    def __init__(self, folder: Path, *arguments: str, output: Path) -> None:
        self.folder = folder
        super().__init__("launch", folder, *arguments, output=output)


StartLaunch = Callable[..., Launched]
SetClock = Callable[[float, float], None]
"""Sets clocks ahead by seconds, and each rank's by more seconds than that of the rank before."""


@contextmanager
def stepping(set_clock: SetClock, chance: random.Random) -> Iterator[None]:
    """Meanwhile the clocks step forward and back at random times, and ranks' clocks differ.

    Rank 0's is never within an hour of the right time.
    """
    over = threading.Event()

    def step() -> None:
        set_clock(chance.choice([-2, 2]) * HOUR, chance.choice([-1, 0, 1]) * HOUR)

    def go_on() -> None:
        while not over.wait(chance.uniform(0.0, 0.3)):
            step()

    step()
    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        set_clock(0.0, 0.0)


def hours_off(run: Run) -> list[int]:
    """By how many hours the clock was wrong at each start of a run of the last half hour."""
    lines = run.metrics_file.read_text().splitlines()
    return [
        round((json.loads(line)["time"] - time.time()) / HOUR) for line in lines if '"kind": "start"' in line
    ]


def sweep(folder: Path, *changes: str) -> Experiment:
    """Sweep the quickstart's matrix with tiny runs and these overrides."""
    succeeded("sweep", "quickstart", *TINY, *changes, "--out", folder)
    return open_experiment(folder)


def train_all(folder: Path | str) -> None:
    """Train the runs of an experiment that are not completed, by replay in this process."""
    for run in open_experiment(Path(folder)).runs:
        if run.status().state != State.COMPLETED:
            succeeded("train", run.folder, "--replay")
            assert run.status().state == State.COMPLETED


class _Replays:
    """In place of the launcher's processes, whose start takes longer than their run: replays in this one."""

    def __init__(self, tasks: Sequence[Task], **_given: object) -> None:
        self._tasks = tasks

    def run(self) -> list[Status]:
        for task in self._tasks:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(joining, "claim", partial(claim, until=task.until))
                ended = asyncpp("train", task.run.folder, "--replay")
            log = Attempt(task.run, task.run.status().attempt).log_file(0)
            if log.parent.is_dir():
                log.write_text(ended.output + ended.errors)
        return [task.run.status() for task in self._tasks]


def launch_in_this_process(patch: pytest.MonkeyPatch) -> None:
    """Let launches on this machine train by replay in the test's process."""
    for module in (start, dry_run):
        patch.setattr(module, "Launcher", _Replays)


def wait_for(condition: Callable[[], object], *, seconds: float, why: Callable[[], object] = str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {seconds:g} s: {why()}"
        time.sleep(0.05)


def most_at_once(experiment: Experiment) -> int:
    """How many of the runs' first attempts overlapped in time."""
    changes = []
    for run in experiment.runs:
        begun, ended = Attempt(run, 1).read(Claimed), Attempt(run, 1).read(Outcome)
        assert begun is not None
        assert ended is not None
        changes += [(begun.claimed, 1), (ended.time, -1)]
    return max(accumulate(change for _, change in sorted(changes)))


def is_training(run: Run) -> bool:
    """Whether its attempt has trained a step."""
    status = run.status()
    return status.state == State.RUNNING and status.train_loss is not None


def processes_of(run: Run) -> list[ProcessId]:
    attempt = Attempt(run, run.status().attempt)
    return [process for rank in (0, 1) for process in attempt.processes(rank)]


def weights(run: Run) -> str:
    """Hash of a completed run's weights."""
    return str(plain(run)[-1]["weights_sha256"])


def rows_of(run: Run, kind: str) -> list[dict[str, Any]]:
    clock = {"seconds", "steady_seconds", "steady_tokens", "busy", "load_per_core"}
    clock |= {"action_seconds", "compute_seconds"}
    # A replay, with which these runs are compared, has no message buffers.
    measured = clock | {"memory"}
    return [
        {key: value for key, value in row.items() if key not in measured}
        for row in plain(run)
        if row["kind"] == kind
    ]


def check_same(run: Run, undisturbed: Run, *, kinds: Sequence[str] = ("step", "eval", "end")) -> None:
    """The same rows, none twice, and the same weights, whose hash is in the `end` row.

    Segments are the same only where none was cut in two by a signal to end.
    """
    for kind in kinds:
        assert rows_of(run, kind) == rows_of(undisturbed, kind), (run.id, kind)
    steps = [row["step"] for row in rows_of(run, "step")]
    assert steps == sorted(set(steps))


def runs_attempt(run: Run, attempt: int) -> bool:
    """Whether this attempt is training."""
    return is_training(run) and run.status().attempt == attempt


_SITE = """\
import os, signal, sys
from pathlib import Path

plan = Path(__file__).with_name("plan.txt")
lines = plan.read_text().splitlines()
if lines and lines[0].split()[0] in sys.orig_argv:
    plan.write_text("\\n".join(lines[1:]))
    os.kill(os.getpid(), signal.Signals[lines[0].split()[1]])
"""


def dying(folder: Path, deaths: Sequence[tuple[str, str]]) -> Path:
    """Create a folder for PYTHONPATH that ends chosen Python processes at their start.

    Args:
        folder: folder to create.
        deaths: in order, a word of the command line of the process to end, and the signal's name.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SITE)
    (folder / "plan.txt").write_text("\n".join(f"{word} {name}" for word, name in deaths))
    return folder
