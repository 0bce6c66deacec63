"""Experiment folders as a finished `launch` leaves them, with chosen numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from support.attempts import claimed
from support.launches import TINY

from asyncpp_cli.report.analysis.aggregate import aggregate_best
from asyncpp_cli.report.analysis.cells import CellResult
from asyncpp_cli.report.formats.charts import Chart, charts
from asyncpp_cli.report.formats.records import to_json
from asyncpp_cli.report.load.experiments import load
from asyncpp_cli.report.load.run import RunResult
from asyncpp_cli.report.tables.document import Report
from asyncpp_cli.runs.attempts.settle import end_rank
from asyncpp_cli.runs.config_file import config_text
from asyncpp_cli.runs.experiment_folder import Cell, Experiment, open_experiment, write_experiment
from asyncpp_cli.runs.processes import this_process
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.settings import with_settings
from asyncpp_cli.runs.status import State, Status
from asyncpp_cli.tune.plan import Question
from asyncpp_cli.tune.tuning import write_tuning
from stages.config.run_config import RunConfig, tokens_per_step

BASE = {
    "schedule.microbatches": 2,
    "model.name": "nano",
    "model.layers": 4,
    "model.width": 128,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.mlp_width": 384,
    "train.steps": 4,
}


def settings(
    schedule: str, optimizer: str, error_feedback: float = 0.0, seed: int = 0, **further: Any
) -> dict[str, Any]:
    return {
        **BASE,
        "schedule.name": schedule,
        "optimizer.name": optimizer,
        "error_feedback.coefficient": error_feedback,
        "seed": seed,
        **further,
    }


def metrics(
    *,
    val_losses: Sequence[float] = (4.0, 3.0),
    steady: Sequence[tuple[int, float]] = ((1000, 2.0), (3000, 2.0)),
    busy: Sequence[Sequence[float]] = ((0.5, 0.7), (0.9, 0.7)),
    delay: int = 0,
    evaluated: Sequence[int] = (2, 4),
    stages: int = 2,
    tokens_per_step: int = 2048,
) -> list[dict[str, Any]]:
    """Rows of a completed run, with a segment and an evaluation up to each step of `evaluated`."""
    start = {
        "kind": "start",
        "attempt": 1,
        "step": 0,
        "time": 0.0,
        "commit": None,
        "torch": "2.13.0",
        "python": "3.11.9",
        "host": "node7",
        "device": "cpu",
        "threads": 1,
        "parameters": 800_000,
        "active_parameters": 800_000,
        "stage_parameters": [400_000, 400_000],
        "microbatches": 2,
        "microbatch_size": 8,
        "context": 128,
        "tokens_per_step": tokens_per_step,
        "bytes_per_token": 1.0,
        "unigram_bits_per_byte": 4.83,
        "replayed": False,
        "shared_gpu": False,
    }
    rows = [start]
    for (done, until), (tokens, seconds), shares, loss in zip(
        pairwise((0, *evaluated)), steady, busy, val_losses, strict=True
    ):
        elapsed = {"seconds": 1.5 * until}
        rows += [_step(step, tokens_per_step * step) for step in range(done + 1, until + 1)]
        rows.append(
            {
                "kind": "segment",
                "first_step": done,
                "steps": until - done,
                "steady_tokens": tokens,
                "steady_seconds": seconds,
                "busy": list(shares),
                "delay_min": [0] * stages,
                "delay_max": [delay] * stages,
                "mismatch_max": [0] * stages,
                **elapsed,
            }
        )
        tokens_done = tokens_per_step * until
        rows.append(
            {"kind": "eval", "step": until, "tokens": tokens_done, "val_loss": loss, "val_loss_error": None}
            | elapsed
        )
    rows.append({"kind": "end", "step": until, "weights_sha256": "0" * 64} | elapsed)
    return rows


def _step(step: int, tokens: int) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": step,
        "tokens": tokens,
        "train_loss": max(5.0 - step / 4, 1.0),
        "lr": 1e-3,
        "grad_norm": 1.0,
        "skipped": False,
        "seconds": 1.5 * step,
    }


class ExperimentFolder:
    """An experiment's folder, to which runs are added one at a time."""

    def __init__(self, folder: Path, *, name: str = "trial") -> None:
        self.folder = folder
        self.name = name
        self.cells: list[Cell] = []

    def add(
        self,
        run_settings: Mapping[str, Any],
        *,
        rows: Sequence[Mapping[str, Any]] | None = None,
        status: Status | None = None,
        axes: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        timeline: Mapping[str, Any] | None = None,
        loss_of: str | None = None,
    ) -> Run:
        """Add a run with these settings and rows; its state is completed by default."""
        default_axes = {
            "schedule": run_settings["schedule.name"],
            "optimizer": run_settings["optimizer.name"],
            "error_feedback": run_settings["error_feedback.coefficient"],
            "model": run_settings["model.name"],
            "seed": run_settings["seed"],
        }
        axes = default_axes | dict(axes or {})
        self.cells.append(Cell(id=run_id or f"run-{len(self.cells)}", axes=axes, loss_of=loss_of))
        experiment = Experiment(
            folder=self.folder, name=self.name, template="trial.yaml", cells=tuple(self.cells)
        )
        run = experiment.run(self.cells[-1].id)
        run.folder.mkdir(parents=True)
        config = RunConfig()
        config = with_settings(config, run_settings)
        run.config_file.write_text(config_text(config))
        run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows or metrics()))
        if timeline is not None:
            run.write_timeline(timeline)
        steps = config.train.steps
        run.write_status(status or Status(state=State.COMPLETED, attempt=1, step=steps, steps=steps))
        write_experiment(experiment)
        return run


LOSSES = {
    ("1f1b", "adamw", 0.0): 2.218,
    ("1f1b", "muon", 0.0): 2.060,
    ("2bw", "adamw", 0.0): 2.449,
    ("2bw", "adamw", 1.0): 2.319,
    ("2bw", "muon", 0.0): 2.121,
    ("2bw", "muon", 1.0): 2.080,
}


def report_of(folder: Path, *, keep_steps: bool = False, target: float | None = None) -> Report:
    experiment = open_experiment(folder)
    runs, _ = load([experiment], keep_steps=keep_steps)
    cells, notes, _ = aggregate_best(runs, target=target)
    return Report(name=experiment.name, cells=cells, notes=notes)


def charts_of_cells(cells: Sequence[CellResult]) -> dict[str, Chart]:
    """The charts of a report with these cells."""
    return charts(Report(name="trial", cells=cells, notes=()))


def cells_of(folder: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(to_json(report_of(folder)))
    return cells


def quickstart_folder(folder: Path, *, seeds: int = 2) -> ExperimentFolder:
    """The six cells of the quickstart, with different numbers in every run."""
    experiment = ExperimentFolder(folder, name="quickstart")
    for (schedule, optimizer, error_feedback), loss in LOSSES.items():
        for seed in range(seeds):
            delay = int(schedule == "2bw")
            rows = metrics(
                val_losses=(4.0, loss + 0.013 * seed),
                steady=((20000 + 7000 * delay + seed, 2.0), (11000 + 3000 * delay, 1.0 + seed / 7)),
                busy=((0.95, 0.9), (0.9, 0.94)) if delay else ((0.7, 0.68), (0.66, 0.71)),
                delay=delay,
            )
            experiment.add(settings(schedule, optimizer, error_feedback, seed), rows=rows)
    return experiment


def begun(run: Run) -> None:
    """Add a completed attempt and its log to a run."""
    attempt = claimed(run, processes=1, replay=True, steps=4)
    attempt.record_start(0, this_process())
    attempt.log_file(0).write_text("a line\n")
    end_rank(attempt, 0, code=0, signal_number=None, stopped=False)
    assert run.status().state == State.COMPLETED


def run(
    schedule: str,
    optimizer: str = "muon",
    error_feedback: float = 0.0,
    *,
    loss: float | None = 3.0,
    speed: float | None = 1000.0,
    seed: int = 0,
    state: str = "completed",
    axes: Mapping[str, Any] | None = None,
    id: str | None = None,
    loss_of: str | None = None,
    measured: Mapping[str, Any] | None = None,
    **further: Any,
) -> RunResult:
    """A run's result without files; `measured` has further fields, `further` settings."""
    return RunResult(
        id=id or f"{schedule}-{seed}",
        axes=dict(axes or {}),
        config=settings(schedule, optimizer, error_feedback, seed, **further),
        state=state,
        loss_of=loss_of,
        val_loss=loss,
        tokens_per_second=speed,
        **(measured or {}),
    )


TUNED_LOSSES = {"1f1b": [3.0, 2.0, 2.5, 4.0], "2bw": [3.0, 2.9, 2.8, 2.1]}
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
    for schedule, losses in TUNED_LOSSES.items():
        runs = [experiment.run(cell.id) for cell in experiment.cells if cell.axes["schedule"] == schedule]
        ranked = sorted(range(4), key=losses.__getitem__)
        for place, index in enumerate(ranked):
            rungs = [2, 4, 16][: 3 if place == 0 else 2 if place == 1 else 1]
            record(runs[index], {step: losses[index] - 0.1 * n for n, step in enumerate(rungs)})
    return experiment
