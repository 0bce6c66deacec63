"""`asyncpp tune`, killed and started again: the result of halving all candidates at once, no step twice."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from support.command_line import ASYNCPP, refusal, succeeded
from support.launches import TINY, wait_for
from support.small_runs import Rows

import asyncpp as api
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.experiment_folder import Experiment, open_experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State
from asyncpp_cli.tune.plan import Question, read_plan
from asyncpp_cli.tune.tuning import write_tuning
from stages.trainer import replay

ARM = ["matrix={schedule: 2bw, optimizer: adamw}", "exclude=[]", "train.steps=9"]
TUNE = ["quickstart", *TINY, *ARM, "--over", "optimizer.lr=1e-4:1e-1:log", "--samples", "3", "--eta", "3"]


def losses_of(run: Run, folder: Path, *, until: int) -> list[float]:
    """The validation losses of a run trained here, at a pause or at its end."""
    return replay(run.config(), recorder=Rows(), checkpoints=folder / run.id, until=until).val_losses


def expected_best(experiment: Experiment, folder: Path) -> tuple[Run, float]:
    first = {run: losses_of(run, folder, until=1)[-1] for run in experiment.runs}
    best = min(experiment.runs, key=first.__getitem__)
    return best, losses_of(best, folder, until=9)[-1]


@pytest.mark.slow
def test_killed_and_started_again(tmp_path: Path) -> None:
    folder = tmp_path / "e"
    arguments = ["tune", *TUNE, "--out", str(folder), "--replay"]
    first = subprocess.Popen([*ASYNCPP, *arguments], stderr=subprocess.PIPE)
    for line in first.stderr:
        if line.startswith(b"started"):
            break
    first.send_signal(signal.SIGKILL)
    first.communicate()
    experiment, plan = open_experiment(folder), read_plan(folder)
    assert plan.arms[0].rungs == (1, 9)
    # Whatever it had started goes on by itself.
    wait_for(lambda: all(current_status(run).state != State.RUNNING for run in experiment.runs), seconds=300)
    ended = succeeded(*arguments, "--json")
    (arm,) = json.loads(ended.output)
    best, loss = expected_best(experiment, tmp_path / "reference")
    assert (arm["runs"], arm["val_loss"]) == ([best.id], loss)
    assert (arm["complete"], arm["steps"], arm["grid_steps"]) == (True, 3 * 1 + 8, 3 * 9)
    for run in experiment.runs:
        assert run.status().state == (State.COMPLETED if run.id == best.id else State.PAUSED)
        steps = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
        written = [row["step"] for row in steps if row["kind"] == "step"]
        assert written == list(range(1, (9 if run.id == best.id else 1) + 1)), "no step is trained twice"
    before = {run.id: run.status() for run in experiment.runs}
    again = succeeded("tune", folder, "--replay")
    assert "2.5 times fewer" in again.errors
    assert {run.id: run.status() for run in experiment.runs} == before, "nothing is left to do"
    longer = tmp_path / "longer"
    succeeded("extend", folder, "--best", "--steps", "12", "--out", longer)
    [continued] = open_experiment(longer).runs
    assert json.loads((continued.folder / "parent.json").read_text())["run"].endswith(best.id)
    assert "is not tuned" in refusal("extend", longer, "--best", "--steps", "15", "--out", tmp_path / "x")


def test_python_asks_the_same_question(tmp_path: Path) -> None:
    """Refused before anything is trained: the folder holds another tuning, made by the command line."""
    asked = {"over": ("optimizer.lr=1e-4:1e-1:log",), "samples": 3, "search_seed": None, "eta": 3}
    question = Question(template="quickstart", changes=(*TINY, *ARM), **asked, rungs=(0.125, 0.25))
    write_tuning(question, out=tmp_path / "e")
    over = {"optimizer.lr": "1e-4:1e-1:log"}
    with pytest.raises(UserError, match="--samples 3 --eta 3"):
        api.tune("quickstart", *TINY, *ARM, over=over, out=tmp_path / "e", samples=3, eta=2)
