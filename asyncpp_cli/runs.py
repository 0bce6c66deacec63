"""The run folder: the one owner of an experiment's files, but for those of single attempts (`attempts`).

EXPERIMENT/experiment.json         name, template, cells {id, axes}
EXPERIMENT/template.yaml           the template with its command-line overrides
EXPERIMENT/lock                    held by who writes the two above; `experiments` owns it
EXPERIMENT/submissions/            what was submitted to a cluster; `cluster.submissions` owns it
EXPERIMENT/cancelled.jsonl           each `asyncpp cancel`; `cluster.cancellations` owns it
EXPERIMENT/code/                   the code that it is to run; `cluster.snapshot` owns it
EXPERIMENT/runs/ID/config.yaml     the run's configuration, never changed
EXPERIMENT/runs/ID/status.json     how it goes, replaced at once
EXPERIMENT/runs/ID/metrics.jsonl   append-only, one JSON object a line
EXPERIMENT/runs/ID/timeline.json   when the ranks did the last actions of the latest segment, replaced at once
EXPERIMENT/runs/ID/logs/           what each rank of each attempt printed
EXPERIMENT/runs/ID/jobs/           submitit's own files
EXPERIMENT/runs/ID/checkpoints/    what it can be resumed from; `stages.checkpoint_files` owns what is in it
EXPERIMENT/runs/ID/attempts/N/     who claimed attempt N, its ranks' processes and how they ended
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncpp_cli.errors import DamagedError, UserError
from asyncpp_cli.files import read_json, write_json
from asyncpp_cli.states import Cause as Cause
from asyncpp_cli.states import State as State
from asyncpp_cli.states import Status as Status
from asyncpp_cli.states import status_from
from stages.checkpoint_files import saved_steps
from stages.config import RunConfig

FORMAT = 1
"""Of experiment.json, status.json and timeline.json; a reader refuses a later one."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of the matrix: the run's id, and what tells it from the others.

    `axes` always has `schedule, optimizer, error_feedback` (the coefficient), `model` and `seed`, then
    further axes under their dotted configuration keys.
    """

    id: str
    axes: dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A run's folder."""

    folder: Path

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def config_file(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def status_file(self) -> Path:
        return self.folder / "status.json"

    @property
    def metrics_file(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def timeline_file(self) -> Path:
        return self.folder / "timeline.json"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def jobs(self) -> Path:
        return self.folder / "jobs"

    @property
    def attempts(self) -> Path:
        return self.folder / "attempts"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def saved_step(self) -> int | None:
        """Steps done in the newest checkpoint; None if there is none, or they cannot be looked at."""
        try:
            return next(iter(saved_steps(self.checkpoints)), None)
        except OSError:
            return None

    @property
    def lock_file(self) -> Path:
        return self.folder / "lock"

    def log_file(self, *, attempt: int, rank: int) -> Path:
        """What the rank printed in that attempt."""
        return self.logs / f"attempt-{attempt}-rank-{rank}.log"

    def config(self) -> RunConfig:
        """The run's resolved configuration.

        Raises:
            DamagedError: the file is missing or is not a run configuration.
        """
        from asyncpp_cli.settings import read_config

        return read_config(self.config_file)

    def status(self) -> Status:
        """What the run's status file says; `pending` where there is none yet.

        Raises:
            DamagedError: the file is there but cannot be read, or the run's folder is gone.
        """
        try:
            content = read_json(self.status_file, newest_format=FORMAT)
        except FileNotFoundError:
            if not self.folder.is_dir():
                raise DamagedError(f"{self.folder} is gone") from None
            return Status()
        try:
            return status_from(content)
        except ValueError as error:
            raise DamagedError(f"{self.status_file} is damaged ({error})") from error

    def write_status(self, status: Status) -> None:
        """Replace the status file at once."""
        write_json(self.status_file, {"format": FORMAT} | asdict(status))

    def write_timeline(self, timeline: Mapping[str, Any]) -> None:
        """Replace the timeline at once."""
        write_json(self.timeline_file, {"format": FORMAT} | dict(timeline))

    def timeline(self) -> Mapping[str, Any] | None:
        """When the ranks did the last actions of the latest segment (`stages.timeline`); None if unknown.

        Raises:
            DamagedError: the file is there but cannot be read.
        """
        try:
            return read_json(self.timeline_file, newest_format=FORMAT)
        except FileNotFoundError:
            return None

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics rows, without those of steps that a later attempt did again.

        An attempt that resumes goes on after what its `start` row names: rows of later steps are dropped.

        A line that is no JSON object is left out: a process that is killed while it writes leaves a torn one.
        """
        rows, _ = self.metrics_and_torn_lines()
        return rows

    def metrics_and_torn_lines(self) -> tuple[list[dict[str, Any]], int]:
        """As `metrics`, and how many lines were left out."""
        try:
            text = self.metrics_file.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return [], 0
        rows: list[dict[str, Any]] = []
        torn = 0
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict) or "kind" not in row:
                torn += 1
                continue
            if row["kind"] == "start":
                rows = [earlier for earlier in rows if holds(earlier, before=row)]
            rows.append(row)
        return rows, torn


def holds(row: Mapping[str, Any], *, before: Mapping[str, Any]) -> bool:
    """Whether a row still holds after a run has begun again with the `start` row `before`."""
    match row["kind"]:
        case "start":
            # What an attempt that did nothing more than this one's beginning was is of no interest.
            return bool(row["step"] < before["step"])
        case "segment":
            return bool(row["first_step"] + row["steps"] <= before["step"])
        case "step":
            # Counted in updates, of which some schedules have several a step.
            return bool(row["step"] <= before.get("updates", before["step"]))
        case "eval":
            return bool(row["step"] <= before["step"])
    return False


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment's folder, as experiment.json has it."""

    folder: Path
    name: str
    template: str
    """The template's name or file, as given to `sweep`."""
    cells: tuple[Cell, ...]

    @property
    def template_file(self) -> Path:
        return self.folder / "template.yaml"

    @property
    def submissions(self) -> Path:
        """What was submitted to a cluster."""
        return self.folder / "submissions"

    @property
    def code(self) -> Path:
        """The code that submitted jobs run."""
        return self.folder / "code"

    def run(self, cell_id: str) -> Run:
        return Run(self.folder / "runs" / cell_id)

    @property
    def runs(self) -> list[Run]:
        """The run of each cell, in the order of the cells."""
        return [self.run(cell.id) for cell in self.cells]


EXPERIMENT_FILE = "experiment.json"


def open_experiment(folder: Path) -> Experiment:
    """The experiment in a folder.

    Raises:
        UserError: there is none, or its description cannot be read.
    """
    file = folder / EXPERIMENT_FILE
    try:
        content = read_json(file, newest_format=FORMAT)
        cells = tuple(Cell(id=cell["id"], axes=dict(cell["axes"])) for cell in content["cells"])
        return Experiment(folder=folder, name=content["name"], template=content["template"], cells=cells)
    except FileNotFoundError:
        message = f"{folder} is not an experiment: it has no {EXPERIMENT_FILE} (`asyncpp sweep` makes one)"
        raise UserError(message) from None
    except DamagedError as error:
        raise UserError(str(error)) from error
    except (KeyError, TypeError) as error:
        raise UserError(f"{file} is not a description of an experiment ({error!r})") from error


def chosen_runs(experiment: Experiment, names: Sequence[str]) -> list[Run]:
    """The runs of these ids, or of ids that begin so and are the only ones that do; all where none is named.

    Raises:
        UserError: a name fits none, or several.
    """
    if not names:
        return experiment.runs
    chosen = []
    for name in names:
        fitting = [cell.id for cell in experiment.cells if cell.id == name] or [
            cell.id for cell in experiment.cells if cell.id.startswith(name)
        ]
        if len(fitting) != 1:
            found = f"{len(fitting)} runs begin so" if fitting else "there is no such run"
            raise UserError(f"{name}: {found}; accepted: an id that `asyncpp status` shows, or its beginning")
        chosen.append(experiment.run(fitting[0]))
    return chosen


def open_run(folder: Path) -> Run:
    """The run in a folder.

    Raises:
        UserError: the folder holds none.
    """
    run = Run(folder)
    if not run.config_file.is_file():
        raise UserError(
            f"{folder} is not a run: it has no {run.config_file.name} (look into EXPERIMENT/runs)"
        )
    return run


def write_experiment(experiment: Experiment) -> None:
    """Write experiment.json."""
    write_json(
        experiment.folder / EXPERIMENT_FILE,
        {
            "format": FORMAT,
            "name": experiment.name,
            "template": experiment.template,
            "cells": [asdict(cell) for cell in experiment.cells],
        },
    )
