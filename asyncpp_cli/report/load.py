"""Experiment folders -> runs as the report sees them; what is wrong with one run's files stays with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock
from typing import Any

from asyncpp_cli import runs
from asyncpp_cli.cluster.attempts import settle
from asyncpp_cli.cluster.queue import Queue
from asyncpp_cli.errors import DamagedError
from asyncpp_cli.report.loaded import Run
from asyncpp_cli.report.measure import Measurement, measure
from asyncpp_cli.report.predict import predicted_bubble
from asyncpp_cli.report.rows import Metrics, read_metrics
from asyncpp_cli.report.utilisation import utilisation
from asyncpp_cli.settings import items

_THREADS = 4
"""Files are read while others are parsed, and polars parses without holding up the interpreter."""


class Loader:
    """Loads experiments, and again as they go on: files that have not changed are not read twice.

    Args:
        keep_steps: whether the runs keep their `step` rows, for curves; a table needs none of them.
    """

    def __init__(self, *, keep_steps: bool) -> None:
        self._keep_steps = keep_steps
        self._known: dict[object, tuple[object, Run]] = {}
        self._configs = Lock()

    def load(self, experiments: Iterable[runs.Experiment]) -> tuple[list[Run], list[str]]:
        """Every run that the experiments list, in their order, and remarks for the reader.

        A run that stands in several experiments counts once: the one that came furthest.
        """
        listed = [
            (cell, one.run(cell.id), queue)
            for one, queue in ((one, Queue(one)) for one in experiments)
            for cell in one.cells
        ]
        with ThreadPoolExecutor(_THREADS) as pool:
            loaded = list(pool.map(lambda entry: self._load(*entry), listed))
        return _once_each(loaded)

    def _load(self, cell: runs.Cell, run: runs.Run, queue: Queue) -> Run:
        signature = _signature(run)
        known = self._known.get(run.folder)
        if known is not None and known[0] == signature and known[1].state == runs.State.COMPLETED:
            return known[1]
        loaded = self._read(cell, run, queue)
        self._known[run.folder] = signature, loaded
        return loaded

    def _read(self, cell: runs.Cell, run: runs.Run, queue: Queue) -> Run:
        plain = Run(id=cell.id, axes=cell.axes, config=None, state="missing", folder=run.folder)
        if not run.folder.is_dir():
            return replace(plain, reason=f"{run.folder} is gone")
        config: Mapping[str, Any] | None = None
        try:
            with self._configs:
                # Their values are checked by one object for all.
                run_config = run.config()
            config = dict(items(run_config))
            status = _status(run, queue)
            metrics = read_metrics(run)
            measurement = measure(metrics)
        except (DamagedError, OSError) as error:
            return replace(plain, config=config, state="damaged", reason=str(error))
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            # Rows are JSON of any shape: a field that is missing or no number shows when it is computed with.
            reason = f"{run.metrics_file} has a row of another form ({error!r})"
            return replace(plain, config=config, state="damaged", reason=reason)
        if status.state == runs.State.COMPLETED and measurement.val_loss is None:
            reason = f"{run.metrics_file} has no evaluation although the run is completed"
            return replace(plain, config=config, state="damaged", reason=reason)
        loaded = replace(
            plain,
            config=config,
            state=str(status.state),
            reason=status.reason or None,
            progress=status.step / status.steps if status.attempt and status.steps else None,
            restarts=max(0, status.attempt - 1),
            measurement=measurement,
            steps=metrics.steps if self._keep_steps else None,
            bubble_predicted=predicted_bubble(run_config),
            problems=_problems(run, metrics),
        )
        return replace(loaded, utilisation=_utilisation(loaded, config, measurement))


def _signature(run: runs.Run) -> object:
    """Changes when a file of the run does."""
    marks: list[tuple[int, int] | None] = []
    for file in (run.config_file, run.status_file, run.metrics_file):
        try:
            stat = file.stat()
        except OSError:
            marks.append(None)
        else:
            marks.append((stat.st_mtime_ns, stat.st_size))
    return tuple(marks)


def _once_each(loaded: Sequence[Run]) -> tuple[list[Run], list[str]]:
    best: dict[str, Run] = {}
    twice: list[str] = []
    for run in loaded:
        if run.id in best:
            twice.append(run.id)
            if _worth(run) <= _worth(best[run.id]):
                continue
        best[run.id] = run
    if not twice:
        return list(best.values()), []
    said = (
        f"{len(twice)} run(s) stand in several of the experiments and count once each: {', '.join(twice[:3])}"
    )
    return list(best.values()), [f"{said}{', ...' if len(twice) > 3 else ''}."]


def _worth(run: Run) -> tuple[bool, int]:
    return run.state == runs.State.COMPLETED, run.measurement.steps_done


def _utilisation(run: Run, config: Mapping[str, Any], measurement: Measurement) -> float | None:
    return utilisation(
        config,
        start=measurement.start,
        tokens_per_second=measurement.tokens_per_second,
        ranks=run.ranks,
    )


def _problems(run: runs.Run, metrics: Metrics) -> tuple[str, ...]:
    return (f"{run.metrics_file}: {metrics.torn} line(s) cut off, left out",) if metrics.torn else ()


def _status(run: runs.Run, queue: Queue) -> runs.Status:
    """The run's status; a run whose processes have vanished without a word is settled first."""
    try:
        return settle(run, scheduler=queue)
    except OSError:
        # Somebody else's experiment, or a read-only disk: the status is taken as it stands.
        return run.status()
