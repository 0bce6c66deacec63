"""Dry run on this machine: checks every cell, shows its job, and trains a small twin of it for a few steps.

A twin has the cell's stages, schedule, micro-batches, optimizer, correction and precision, with a tiny model
of the same kind and at most two data ranks. Cells of one kind, whose twins differ in numbers such as the
learning rate alone, share that of the first. A twin of many ranks is trained by replay, in one process.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncpp_cli.base.console import roughly, say, show_table
from asyncpp_cli.base.tables import Fit
from asyncpp_cli.experiment.run_data import config_to_train, naming_config
from asyncpp_cli.launch.common.supervisor import train_words
from asyncpp_cli.launch.local_machine import Launcher, Task
from asyncpp_cli.launch.progress import Display, shown_progress
from asyncpp_cli.runs.config_file import config_text
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.settings import config_hash, items
from asyncpp_cli.runs.status import State
from asyncpp_cli.sites.resources import ranks_of, resources_of, this_machine
from stages.config.run_config import RunConfig, TrainConfig, changed
from stages.resolve.checks import check
from stages.resolve.facts import facts

Settings = frozenset[tuple[str, object]]

MOST_PROCESSES = 8
"""A twin with more ranks is trained by replay."""

STEPS = 4

EXPERTS = 4
"""Maximum for a twin."""

DATA_RANKS = 2
"""Maximum for a twin; further data ranks do the same as the second."""

_PROCESS_SECONDS, _COMPILE_SECONDS = 10.0, 40.0
"""Time of a twin's process on a core, most of it for loading torch, and more where blocks are compiled."""


@dataclass(frozen=True)
class _DryRunCell:
    """A cell with its twin's configuration."""

    run: Run
    ranks: int
    threads: int
    twin: RunConfig

    @property
    def kind(self) -> Settings:
        """The twin's settings, of numbers that are no counts only whether they are 0."""
        return frozenset(
            (key, bool(value) if isinstance(value, float) else repr(value)) for key, value in items(self.twin)
        )

    @property
    def twin_id(self) -> str:
        twin = self.twin
        readable = f"{twin.schedule.name}-{twin.optimizer.name}-ef{twin.error_feedback.coefficient:g}"
        shape = f"{twin.parallel.stages}stages" + (f"x{twin.parallel.data}" if twin.parallel.data > 1 else "")
        return f"{readable}-{shape}-{config_hash(twin)[:8]}"


def twin_of(config: RunConfig) -> RunConfig:
    """A configuration's twin: with a tiny model, a short context and at most two pipelines."""
    model, layers = config.model, facts(config).schedule.stages
    twin: dict[str, Any] = {
        "model.name": "twin",
        "model.layers": layers,
        "model.width": 32,
        "model.heads": 2,
        "model.kv_heads": 1 if model.kv_heads < model.heads else 2,
        "model.head_dim": None,
        "model.mlp_width": 64,
        "model.init": None,
        "model.init_sha256": None,
        "train.steps": STEPS,
        "train.microbatch_size": 1,
        "train.eval_interval": STEPS // 2,
        "train.eval_microbatches": TrainConfig.eval_microbatches,
        "train.eval_tokens": 1,
        "train.checkpoint_interval": 0,
        "parallel.cut": None,
        "parallel.data": min(config.parallel.data, DATA_RANKS),
        "data.context": 16,
        "site.device": "cpu",
        "site.threads": 1,
        "seed": 0,
    }
    if model.active_experts is not None and model.experts:
        # Few and small ones, with shared ones and a dense block where there were some.
        twin |= {
            "model.experts": min(model.experts, EXPERTS),
            "model.active_experts": min(model.active_experts, EXPERTS // 2),
            "model.expert_width": 32,
            "model.shared_experts": min(model.shared_experts, 1),
            "model.dense_layers": min(model.dense_layers, 1, layers - 1),
        }
    return changed(config, twin)


def dry_run(experiment: Experiment, *, replay: bool, quiet: bool) -> bool:
    """Dry-run an experiment; returns whether all twins trained. Prints tables of jobs and of twins.

    Raises:
        UserError: a cell cannot be trained; nothing is run.
        asyncpp_cli.launch.local_machine.Interrupted: Ctrl-C.
    """
    seen: dict[str, Any] = {}
    cells = [_checked_cell(run, seen) for run in experiment.runs]
    twins: dict[Settings, _DryRunCell] = {}
    for cell in cells:
        twins.setdefault(cell.kind, cell)
    _show_jobs(experiment, cells, replay=replay)
    in_one_process = [cell for cell in twins.values() if replay or ranks_of(cell.twin) > MOST_PROCESSES]
    distributed = [cell for cell in twins.values() if cell not in in_one_process]
    seconds = _seconds(in_one_process, distributed, cores=this_machine().cores)
    say(
        f"Training {len(twins)} small twins, one per kind of cell, for {STEPS} steps each: about "
        f"{roughly(seconds)} if nothing else runs here. What they write is removed afterwards."
    )
    if in_one_process and not replay:
        count = len(in_one_process)
        say(f"Twins of more than {MOST_PROCESSES} ranks are trained in one process (replay): {count}.")
    with tempfile.TemporaryDirectory(prefix="asyncpp-dry-run-") as folder:
        outcomes = _train(distributed, Path(folder), replay=False, quiet=quiet)
        outcomes |= _train(in_one_process, Path(folder), replay=True, quiet=quiet)
    _show_outcomes(
        experiment, cells, {cell.kind: (cell.twin_id, outcomes[cell.twin_id]) for cell in twins.values()}
    )
    return not any(outcomes.values())


def _seconds(
    in_one_process: Sequence[_DryRunCell], distributed: Sequence[_DryRunCell], *, cores: int
) -> float:
    """About how long twins take, those of many processes together with others as far as there are cores."""
    works = [(1, cell) for cell in in_one_process] + [(ranks_of(cell.twin), cell) for cell in distributed]
    work = longest = 0.0
    for processes, cell in works:
        each = _PROCESS_SECONDS + (_COMPILE_SECONDS if cell.twin.train.compile else 0.0)
        work += each * processes
        longest = max(longest, each * max(1.0, processes / cores))
    return max(longest, work / cores)


def _show_jobs(experiment: Experiment, cells: list[_DryRunCell], *, replay: bool) -> None:
    rows = [
        [
            cell.run.id,
            str(cell.ranks),
            str(1 if replay else cell.ranks),
            str(cell.threads),
            shlex.join([sys.executable, *train_words(cell.run.folder, replay=replay)]),
        ]
        for cell in cells
    ]
    columns = ["run", "ranks", "processes", "threads each", "command of each process"]
    fit = Fit(share=columns[1:4], fold=["command of each process"])
    show_table(columns, rows, title=f"{experiment.name}: {len(rows)} cells, all valid", fit=fit)


def _show_outcomes(
    experiment: Experiment, cells: list[_DryRunCell], outcomes: dict[Settings, tuple[str, str]]
) -> None:
    """A table of twins: by kind, its id and why it failed, empty if it did not."""
    counts = Counter(cell.kind for cell in cells)
    rows = [[twin, str(counts[kind]), reason or "ok"] for kind, (twin, reason) in outcomes.items()]
    failed = sum(counts[kind] for kind, (_, reason) in outcomes.items() if reason)
    title = f"{experiment.name}: dry run, {len(cells) - failed} of {len(cells)} cells ok"
    show_table(["twin", "cells", "outcome"], rows, title=title, fit=Fit(fold=["outcome"]))


def _checked_cell(run: Run, seen: dict[str, Any]) -> _DryRunCell:
    with naming_config(run):
        config = config_to_train(run)
        check(config, seen=seen)
    return _DryRunCell(run=run, ranks=ranks_of(config), threads=config.site.threads, twin=twin_of(config))


def _train(cells: list[_DryRunCell], folder: Path, *, replay: bool, quiet: bool) -> dict[str, str]:
    """Train twins in a folder; returns for each twin's id why it failed, empty if it did not."""
    machine = replace(this_machine(), gpus=())
    tasks = []
    for cell in cells:
        run = Run(folder / f"{cell.twin_id}")
        run.folder.mkdir()
        run.config_file.write_text(config_text(cell.twin), encoding="utf-8")
        resources = resources_of(cell.twin, replay=replay, machine=machine)
        tasks.append(Task(run, resources, cell.twin))
    with shown_progress(Display(), quiet=quiet) as progress:
        statuses = Launcher(tasks, machine=machine, max_parallel=None, replay=replay, progress=progress).run()
    return {
        task.run.id: "" if status.state == State.COMPLETED else status.reason
        for task, status in zip(tasks, statuses, strict=True)
    }
