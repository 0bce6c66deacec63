"""Runs that are killed again and again, started again, and compared with runs that nobody disturbed.

Small runs of two processes: a random rank is killed with SIGKILL at a random time (while it starts, trains or
saves), and the run is started again, until it is complete. Meanwhile the ranks' clocks step two hours forward
and back, and apart. Then its rows and its weights must be those of the undisturbed run, no checkpoint may be
lost, and none may be damaged. The processes are `asyncpp train`, as torchrun would start them, but forked
from one that has loaded torch. ASYNCPP_TEST_KILLS=100 kills that often.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.forkserver
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.launches import SetClock, hours_off, stepping

from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State
from stages.checkpoint import files as checkpoint_files

KILLS = int(os.environ.get("ASYNCPP_TEST_KILLS", "6"))
RANKS = 2
TEMPLATE = """
zip:
  schedule: [1f1b, 2bw, 2bw, pipedream, paci]
  error_feedback: [false, false, true, false, false]
  optimizer: [muon, adamw, muon, muon, adamw]
  train.clip: [global, global, global, stage, stage]
model: micro
data: {{context: 16, path: {text}}}
schedule: {{microbatches: 2}}
parallel: {{stages: 2}}
train: {{steps: 48, microbatch_size: 1, eval_interval: 24, eval_microbatches: 2, checkpoint_interval: 12}}
site: {{device: cpu, timeout: 60}}
"""
OF_A_PROCESS = {
    *("time", "seconds", "steady_seconds", "steady_tokens", "busy"),
    *("action_seconds", "compute_seconds", "load_per_core", "checksum", "memory"),
}
"""Fields that a replay, with which the killed runs are compared, fills differently."""
SURVIVORS_TIME = 5.0
"""Seconds in which the ranks that are left may notice; torchrun, or a supervisor, ends them then."""
LONGEST_ATTEMPT = 200.0
"""Seconds."""

forkserver = multiprocessing.get_context("forkserver")


def train_as(folder: str, environment: dict[str, str], *, replay: bool) -> None:
    """A process of an attempt: what `asyncpp train` does in the environment that torchrun gives it."""
    log = os.open(Path(folder) / "soak.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    import typer

    from asyncpp_cli.commands.runs.train import train

    try:
        train(Path(folder), replay=replay)
    except typer.Exit as leaving:
        sys.exit(leaving.exit_code)


class Attempt:
    """One start of a run, in `size` processes."""

    def __init__(self, run: Run, *, size: int, number: int) -> None:
        self.run = run
        self.started = time.monotonic()
        self._left_over = set(self._unfinished())
        self._size_before = self._metrics_size()
        own = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "TORCHELASTIC_RUN_ID": f"soak-{number}",
        }
        own |= {name: os.environ[name] for name in ("ASYNCPP_CACHE", "OMP_NUM_THREADS")}
        self.processes = [
            forkserver.Process(
                target=train_as,
                args=(str(run.folder), own | {"RANK": str(rank), "LOCAL_RANK": str(rank)}),
                kwargs={"replay": size == 1},
            )
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def _metrics_size(self) -> int:
        return self.run.metrics_file.stat().st_size if self.run.metrics_file.exists() else 0

    @property
    def goes_on(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    @property
    def trains(self) -> bool:
        return self._metrics_size() > self._size_before

    def _unfinished(self) -> Iterator[tuple[str, int]]:
        """Checkpoints that are being written, or were when an earlier attempt was killed."""
        for folder in self.run.checkpoints.glob(".writing-*"):
            with suppress(FileNotFoundError):
                yield folder.name, folder.stat().st_ctime_ns

    @property
    def saves(self) -> bool:
        return any(folder not in self._left_over for folder in self._unfinished())

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait for something, or for the attempt's end."""
        while self.goes_on and not reached():
            assert time.monotonic() - self.started < LONGEST_ATTEMPT, f"{self.run.folder} stands still"
            time.sleep(0.0005)

    def finish(self, *, seconds: float) -> bool:
        """Wait for all processes to end; False if one had to be killed."""
        deadline = time.monotonic() + seconds
        by_themselves = True
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                by_themselves = False
            process.join()
        return by_themselves


def killed_once(attempt: Attempt, chance: random.Random) -> bool:
    """Kill a random rank of an attempt at a random time, unless the run completes before."""
    match chance.choice(["any", "training", "saving"]):
        case "any":
            moment = attempt.started + chance.uniform(0.0, 2.0)
        case "training":
            attempt.wait_until(lambda: attempt.trains)
            moment = time.monotonic() + chance.uniform(0.0, 0.5)
        case _:
            attempt.wait_until(lambda: attempt.trains)
            time.sleep(chance.uniform(0.0, 0.3))
            attempt.wait_until(lambda: attempt.saves)
            moment = time.monotonic() + chance.uniform(0.0, 0.01)
    attempt.wait_until(lambda: time.monotonic() >= moment)
    victim = chance.choice(attempt.processes)
    if not attempt.goes_on or victim.pid is None:
        return False
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    return victim.exitcode == -signal.SIGKILL  # otherwise it had just ended by itself


def disturb(run: Run, undisturbed: Run, *, kills: int, chance: random.Random) -> int:
    """Run to the end with at most `kills` kills, and look for what is missing; returns the kills."""
    killed = number = 0
    saved: dict[int, int] = {}
    while run.status().state != State.COMPLETED:
        number += 1
        before, attempts = run.saved_step or 0, run.status().attempt
        assert before >= max(saved.values(), default=0), "a checkpoint is lost"
        attempt = Attempt(run, size=RANKS, number=number)
        if killed < kills:
            killed += killed_once(attempt, chance)
            attempt.finish(seconds=LONGEST_ATTEMPT if attempt.goes_on else SURVIVORS_TIME)
        else:
            assert attempt.finish(seconds=LONGEST_ATTEMPT), f"{run.folder} stands still"
            assert [process.exitcode for process in attempt.processes] == [0] * RANKS
        if run.status().attempt > attempts:
            saved[run.status().attempt] = before
    assert compare(run, undisturbed, saved) == []
    return killed


def compare(run: Run, undisturbed: Run, saved: dict[int, int]) -> list[str]:
    """What is lost, doubled, different or damaged in a run that was killed and is complete.

    Args:
        run: which.
        undisturbed: the same without a kill.
        saved: by attempt, the newest checkpoint when it began.
    """
    problems = []
    kept, expected = comparable(run.metrics()), comparable(undisturbed.metrics())
    if kept != expected:
        kinds = [Counter(row["kind"] for row in rows) for rows in (kept, expected)]
        problems.append(f"its rows differ: {kinds[0]} instead of {kinds[1]}")
    written = [json.loads(line) for line in run.metrics_file.read_text().splitlines() if line.endswith("}")]
    for row in written:
        if row["kind"] == "start" and row["step"] != saved[row["attempt"]]:
            problems.append(
                f"attempt {row['attempt']} began after {row['step']}, not {saved[row['attempt']]}"
            )
    done = comparable([row for row in written if row["kind"] != "start"])
    problems += [f"a row that was done again differs: {row}" for row in done if row not in expected]
    if "is not used" in (run.folder / "soak.log").read_text():
        problems.append("a checkpoint was damaged")
    for step in checkpoint_files.saved_steps(run.checkpoints):
        folder = checkpoint_files.folder_of(run.checkpoints, step)
        wrong = checkpoint_files.damage(folder, checkpoint_files.read_manifest(folder).items())
        problems += [f"checkpoint {step}: {wrong}"] if wrong else []
    return problems


def comparable(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if key not in OF_A_PROCESS}
        for row in rows
        if row["kind"] != "start"
    ]


def fresh(run: Run, name: str) -> Run:
    """The same run, not yet begun, in another folder."""
    copy = Run(run.folder.parent.parent / "disturbed" / name)
    copy.folder.mkdir(parents=True)
    shutil.copy(run.config_file, copy.config_file)
    return copy


def rewrite(change: Callable[[list[str]], list[str]]) -> Callable[[Run], None]:
    def harm(run: Run) -> None:
        lines = run.metrics_file.read_text().splitlines(keepends=True)
        run.metrics_file.write_text("".join(change(lines)))

    return harm


def last_step(lines: list[str]) -> int:
    """Which line is the last step's: a kill after the last checkpoint leaves the last attempt without one."""
    return max(number for number, line in enumerate(lines) if json.loads(line)["kind"] == "step")


def without_a_row(lines: list[str]) -> list[str]:
    return [line for number, line in enumerate(lines) if number != last_step(lines)]


def with_a_doubled_row(lines: list[str]) -> list[str]:
    at = last_step(lines)
    return [*lines[: at + 1], *lines[at:]]


def flip(run: Run) -> None:
    file = next(run.checkpoints.glob("step-*/rank-0.safetensors"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def warn(run: Run) -> None:
    with (run.folder / "soak.log").open("a") as log:
        log.write("warning: checkpoint step-6 is not used: it is damaged\n")


HARMS = {
    "a missing row": (rewrite(without_a_row), "its rows differ"),
    "a doubled row": (rewrite(with_a_doubled_row), "its rows differ"),
    "another row": (rewrite(lambda lines: [*lines[:-1], lines[-1].replace('"end"', '"END"')]), "rows differ"),
    "another beginning": (
        rewrite(lambda lines: [lines[0].replace('"step": 0', '"step": 6', 1), *lines[1:]]),
        "began",
    ),
    "a flipped bit": (flip, "SHA-256 differs"),
    "a warning": (warn, "was damaged"),
}


@pytest.fixture
def own_forkserver() -> Iterator[None]:
    """A server that is started here, and ended: one that other tests share has the environment, and so the
    clock, of whichever began it."""
    server = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    server._stop()
    yield
    server._stop()


@pytest.mark.timeout(300 + 50 * KILLS)
@pytest.mark.slow
@pytest.mark.usefixtures("own_forkserver")
def test_nothing_is_lost_in_kills_at_random_times(
    tmp_path: Path, chance: random.Random, monkeypatch: pytest.MonkeyPatch, set_clock: SetClock
) -> None:
    monkeypatch.setenv("ASYNCPP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "soak.yaml").write_text(TEMPLATE.format(text=Path(__file__)))
    sweep = ["sweep", str(tmp_path / "soak.yaml"), "--out", str(tmp_path / "e")]
    subprocess.run([sys.executable, "-m", "asyncpp_cli", *sweep], check=True, stdout=subprocess.DEVNULL)
    forkserver.set_forkserver_preload(
        [
            "asyncpp_cli.commands.runs.train",
            "asyncpp_cli.runs.attempts.recorder",
            "stages.trainer",
            "torch._dynamo",
        ]
    )
    runs = open_experiment(tmp_path / "e").runs
    kills = copies = 0
    for index, run in enumerate(runs):
        assert Attempt(run, size=1, number=0).finish(seconds=LONGEST_ATTEMPT)
        assert run.status().state == State.COMPLETED
        wanted = kills + -(-(KILLS - kills) // (len(runs) - index))
        while kills < wanted:
            copies += 1
            copy = fresh(run, f"{copies}-{run.id}")
            with stepping(set_clock, random.Random(chance.random())):
                kills += disturb(copy, run, kills=wanted - kills, chance=chance)

    disturbed = [Run(folder) for folder in sorted((tmp_path / "e" / "disturbed").iterdir())]
    assert all(off for run in disturbed for off in hours_off(run)), "no clock was set"
    run = disturbed[0]
    (undisturbed,) = (whole for whole in open_experiment(tmp_path / "e").runs if run.id.endswith(whole.id))
    starts = [json.loads(line) for line in run.metrics_file.read_text().splitlines() if '"start"' in line]
    saved = {row["attempt"]: row["step"] for row in starts}
    whole = {file: file.read_bytes() for file in run.folder.rglob("*") if file.is_file()}
    assert compare(run, undisturbed, saved) == []
    for name, (harm, words) in HARMS.items():
        harm(run)
        assert words in " ".join(compare(run, undisturbed, saved)), name
        for file, content in whole.items():
            file.write_bytes(content)
