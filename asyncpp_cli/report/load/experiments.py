"""Loads the runs of experiment folders; a damaged run does not keep the others from being loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from asyncpp_cli.base.errors import DamagedError
from asyncpp_cli.base.progress import shown
from asyncpp_cli.planner.costs.devices import peak_tflops
from asyncpp_cli.report.load.checks import fault, predicted
from asyncpp_cli.report.load.measure import Measurement, measure
from asyncpp_cli.report.load.metrics_rows import Metrics, read_metrics
from asyncpp_cli.report.load.run import RunResult
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.cost import cost_of_run
from asyncpp_cli.runs.attempts.files import Claimed, Outcome
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.experiment_folder import Cell, Experiment, runs_at
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.settings import items
from asyncpp_cli.runs.status import UNKNOWN, State, Status, state_after
from asyncpp_cli.slurm.run_status import SlurmQueue
from stages.config.records import read_record
from stages.config.run_config import RunConfig
from stages.shape.families import FAMILIES, describe

_THREADS = 4
"""A file server takes long to answer, for each of a run's files."""


def load(experiments: Iterable[Experiment], *, keep_steps: bool) -> tuple[list[RunResult], list[str]]:
    """Every run of the experiments, in order, and remarks for the reader.

    A run that is in several experiments counts once: the one that is furthest.

    Args:
        experiments: to load.
        keep_steps: whether to keep the `step` rows of runs, for curves; tables need none of them.
    """
    # All configurations are checked by one shared object.
    configs = Lock()
    listed = [
        (cell, experiment.run(cell.id), queue)
        for experiment, queue in ((experiment, SlurmQueue(experiment)) for experiment in experiments)
        for cell in experiment.cells
    ]
    loaded = []
    with ThreadPoolExecutor(_THREADS) as pool, shown("reading runs", total=len(listed)) as advance:
        for run in pool.map(lambda each: _load(*each, configs=configs, keep_steps=keep_steps), listed):
            loaded.append(run)
            advance(1)
    return _once_each(loaded)


def _load(cell: Cell, run: Run, queue: SlurmQueue, *, configs: Lock, keep_steps: bool) -> RunResult:
    task = queue.submissions.array_tasks.get(cell.id)
    plain = RunResult(
        id=cell.id,
        axes=cell.axes,
        config=None,
        state="missing",
        folder=run.folder,
        loss_of=cell.loss_of,
        site="" if task is None else task.submission.site,
    )
    if not run.folder.is_dir():
        return replace(plain, reason=f"{run.folder} is gone")
    config: Mapping[str, Any] | None = None
    try:
        with configs:
            run_config = run.config()
        config = dict(items(run_config))
        if (lineage := run.lineage()) is not None:
            # Not the same as a run of this configuration from its beginning.
            config = {**config, "continues": lineage.label}
        status = current_status(run, scheduler=queue)
        if status.state in UNKNOWN:
            return replace(plain, config=config, state=str(status.state), reason=status.reason)
        metrics = read_metrics(run)
        prediction = predicted(run_config)
        if wrong := fault(metrics, run_config, prediction, state=status.state, from_start=lineage is None):
            return replace(plain, config=config, state="damaged", reason=f"{run.metrics_file}: {wrong}")
        # The loss of a run for its speed alone is that of another.
        measured = measure(metrics if cell.loss_of is None else replace(metrics, evaluations=()))
    except (DamagedError, OSError) as error:
        return replace(plain, config=config, state=str(state_after(error)), reason=str(error))
    except (IndexError, OverflowError, ValueError, ZeroDivisionError) as error:
        # Lists of unlike lengths, numbers that are too large.
        reason = f"{run.metrics_file} has a row of another form ({error})"
        return replace(plain, config=config, state="damaged", reason=reason)
    return replace(
        plain,
        **vars(measured),
        config=config,
        state=str(status.state),
        reason=status.reason or None,
        progress=status.step / status.steps if status.attempt and status.steps else None,
        restarts=_restarts(status, measured),
        steps=metrics.steps if keep_steps and cell.loss_of is None else None,
        prediction=prediction,
        cost=cost_of_run(run, status),
        lineage=lineage,
        problems=_problems(run, metrics, status),
        mfu=utilisation(run_config, measured),
    )


def _once_each(loaded: Sequence[RunResult]) -> tuple[list[RunResult], list[str]]:
    best: dict[str, RunResult] = {}
    repeated: list[str] = []
    for run in loaded:
        if run.id in best:
            repeated.append(run.id)
            if _progress(run) <= _progress(best[run.id]):
                continue
        best[run.id] = run
    if not repeated:
        return list(best.values()), []
    remark = (
        f"{len(repeated)} run(s) are in several of the experiments and count once each: "
        f"{', '.join(repeated[:3])}{', ...' if len(repeated) > 3 else ''}."
    )
    return list(best.values()), [remark]


def _progress(run: RunResult) -> tuple[bool, int]:
    return run.state == State.COMPLETED, run.steps_done


def _restarts(status: Status, run: Measurement) -> int:
    """Attempts that began anew where another had ended, but not those that went on after a pause."""
    continued = run.pauses - (status.state == State.PAUSED)
    return max(0, status.attempt - 1 - continued)


def _problems(run: Run, metrics: Metrics, status: Status) -> tuple[str, ...]:
    found = [f"{run.metrics_file}: {metrics.torn} truncated line(s) left out"] if metrics.torn else []
    for number in range(1, status.attempt + 1):
        for kind in (Claimed, Outcome):
            try:
                read_record(Attempt(run, number).file(kind), kind)
            except FileNotFoundError:
                continue
            except DamagedError as error:
                found.append(f"{error}; the cost of this attempt is not known")
    return tuple(found)


def load_selection(path: Path) -> list[RunResult]:
    """The runs that a path names.

    Args:
        path: folder of an experiment, of a run, or EXPERIMENT/BEGINNING: all its runs whose ids begin so.

    Raises:
        UserError: it names none of these.
    """
    experiment, cells = runs_at(path)
    return load([replace(experiment, cells=cells)], keep_steps=False)[0]


_TERA = 1e12


def utilisation(config: RunConfig, run: Measurement) -> float | None:
    """MFU in 0..1, with one device per rank; None where the throughput, the device's peak or the model's
    arithmetic is unknown.

    `site.peak_tflops` of the configuration goes before the table.
    """
    if run.start is None or run.start.device is None or run.tokens_per_second is None:
        return None
    if config.model.factory is not None or config.model.family not in FAMILIES:
        return None
    peak = config.site.peak_tflops or peak_tflops(run.start.device, config.train.precision)
    if not peak:
        return None
    flops = describe(config.model).training_flops(context=config.data.context)
    ranks = config.parallel.stages * config.parallel.data
    return run.tokens_per_second * flops / (ranks * peak * _TERA)
