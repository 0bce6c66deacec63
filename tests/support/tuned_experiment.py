"""An experiment that looks as `asyncpp tune` leaves it."""

from __future__ import annotations

import json
from pathlib import Path

from support.launches import TINY
from support.report_experiment import metrics

from asyncpp_cli.runs.experiment_folder import Experiment, open_experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status
from asyncpp_cli.tune.plan import Question
from asyncpp_cli.tune.tuning import write_tuning
from stages.config.run_config import tokens_per_step

LOSSES = {"1f1b": [3.0, 2.0, 2.5, 4.0], "2bw": [3.0, 2.9, 2.8, 2.1]}
"""By rate; of 1f1b the second is the best, of 2bw the last."""


def record(run: Run, losses: dict[int, float]) -> None:
    """Write what a run leaves that was trained to the last of these steps."""
    config = run.config()
    stages = config.parallel.stages
    rows = metrics(
        evaluated=tuple(losses),
        val_losses=tuple(losses.values()),
        steady=[(1000, 2.0)] * len(losses),
        busy=[[0.5] * stages] * len(losses),
        stages=stages,
        tokens_per_step=tokens_per_step(config),
    )
    last = max(losses)
    completed = last == config.train.steps
    if not completed:
        rows[-1] = {"kind": "pause", "step": last, "seconds": rows[-1]["seconds"]}
    run.metrics_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    state = State.COMPLETED if completed else State.PAUSED
    run.write_status(Status(state=state, attempt=1, step=last, steps=config.train.steps))


def tuned_experiment(folder: Path) -> Experiment:
    """Two arms of four candidates: 4 to step 2, 2 to step 4, 1 to step 16, their losses falling by 0.1."""
    matrix = ["matrix={schedule: [1f1b, 2bw], optimizer: adamw}", "exclude=[]", "train.steps=16"]
    question = Question(
        template="quickstart",
        changes=(*TINY, *matrix),
        over=("optimizer.lr=1e-4:1e-1:log",),
        samples=4,
        search_seed=None,
        eta=2,
        rungs=(0.125, 0.25),
    )
    write_tuning(question, out=folder)
    experiment = open_experiment(folder)
    for schedule, losses in LOSSES.items():
        runs = [experiment.run(cell.id) for cell in experiment.cells if cell.axes["schedule"] == schedule]
        ranked = sorted(range(4), key=losses.__getitem__)
        for place, index in enumerate(ranked):
            rungs = [2, 4, 16][: 3 if place == 0 else 2 if place == 1 else 1]
            record(runs[index], {step: losses[index] - 0.1 * n for n, step in enumerate(rungs)})
    return experiment
