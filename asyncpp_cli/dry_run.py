"""A rehearsal on this machine: every cell checked, its job shown, a small twin of it trained for a few steps.

A twin has the cell's stages, schedule, micro-batches, optimizer, correction and precision, and a model of the
same kind with little in it; of many data ranks it has two. Cells that have the same twin share it. Where a
twin would need many processes, its ranks take turns in one.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncpp_cli.cluster.launcher import Launcher, Task
from asyncpp_cli.cluster.local import command_of
from asyncpp_cli.cluster.resources import ranks_of, resources_of, this_machine
from asyncpp_cli.console import say, show_table
from asyncpp_cli.errors import DamagedError, UserError
from asyncpp_cli.progress import shown_progress
from asyncpp_cli.run_data import config_to_train
from asyncpp_cli.runs import Cell, Experiment, Run, State
from asyncpp_cli.settings import config_hash, config_text, copy_of
from stages.check import ConfigError, check
from stages.config import RunConfig

MOST_PROCESSES = 8
"""A twin with more ranks is trained in one process."""

STEPS = 4

DATA_RANKS = 2
"""At most: every further one does what the second does, and takes as long."""


@dataclass(frozen=True)
class _Rehearsal:
    cell: Cell
    run: Run
    ranks: int
    threads: int
    twin: RunConfig

    @property
    def twin_id(self) -> str:
        twin = self.twin
        readable = f"{twin.schedule.name}-{twin.optimizer.name}-ef{twin.error_feedback.coefficient:g}"
        shape = f"{twin.parallel.stages}stages" + (f"x{twin.parallel.data}" if twin.parallel.data > 1 else "")
        return f"{readable}-{shape}-{config_hash(twin)[:8]}"


def twin_of(config: RunConfig) -> RunConfig:
    """A run like this one in everything that can go wrong but size: one block a stage, narrow and short, on
    two pipelines at most."""
    twin = copy_of(config)
    grouped = config.model.kv_heads < config.model.heads
    twin.model = replace(
        config.model,
        name="twin",
        layers=config.parallel.stages * config.schedule.chunks,
        width=32,
        heads=2,
        kv_heads=1 if grouped else 2,
        mlp_width=64,
        init=None,
        init_sha256=None,
    )
    twin.parallel = replace(config.parallel, cut=None, data=min(config.parallel.data, DATA_RANKS))
    twin.data = replace(config.data, context=16)
    twin.train = replace(
        config.train,
        steps=STEPS,
        microbatch_size=1,
        eval_interval=STEPS // 2,
        eval_microbatches=1,
        checkpoint_interval=0,
    )
    twin.site = replace(config.site, device="cpu", threads=1)
    twin.seed = 0
    return twin


def dry_run_of(experiment: Experiment, *, replay: bool) -> bool:
    """Rehearse an experiment: tables of jobs, then of twins, on standard output. Whether all went well.

    Raises:
        UserError: a cell cannot be trained; nothing is run then.
        asyncpp_cli.cluster.launcher.Interrupted: Ctrl-C.
    """
    seen: dict[tuple[Any, ...], Any] = {}
    rehearsals = [_rehearse(experiment, cell, seen, replay=replay) for cell in experiment.cells]
    twins = {rehearsal.twin_id: rehearsal for rehearsal in rehearsals}
    _show_jobs(experiment, rehearsals, replay=replay)
    say(f"Training {len(twins)} small twins for {STEPS} steps each; what they write is removed afterwards.")
    together = [
        rehearsal for rehearsal in twins.values() if replay or ranks_of(rehearsal.twin) > MOST_PROCESSES
    ]
    apart = [rehearsal for rehearsal in twins.values() if rehearsal not in together]
    if together and not replay:
        say(
            f"Twins of more than {MOST_PROCESSES} ranks are trained in one process (replay): {len(together)}."
        )
    with tempfile.TemporaryDirectory(prefix="asyncpp-dry-run-") as folder:
        outcomes = _train(apart, Path(folder), replay=False) | _train(together, Path(folder), replay=True)
    _show_outcomes(experiment, rehearsals, outcomes)
    return not any(outcomes.values())


def _show_jobs(experiment: Experiment, rehearsals: list[_Rehearsal], *, replay: bool) -> None:
    rows = [
        [
            rehearsal.cell.id,
            str(rehearsal.ranks),
            str(1 if replay else rehearsal.ranks),
            str(rehearsal.threads),
            command_of(rehearsal.run.folder, replay=replay),
        ]
        for rehearsal in rehearsals
    ]
    columns = ["run", "ranks", "processes", "threads each", "command of each process"]
    show_table(columns, rows, title=f"{experiment.name}: {len(rows)} cells, all valid")


def _show_outcomes(experiment: Experiment, rehearsals: list[_Rehearsal], outcomes: dict[str, str]) -> None:
    cells = Counter(rehearsal.twin_id for rehearsal in rehearsals)
    rows = [[twin, str(cells[twin]), reason or "ok"] for twin, reason in outcomes.items()]
    failed = sum(cells[twin] for twin, reason in outcomes.items() if reason)
    title = f"{experiment.name}: dry run, {len(rehearsals) - failed} of {len(rehearsals)} cells ok"
    show_table(["twin", "cells", "outcome"], rows, title=title)


def _rehearse(
    experiment: Experiment, cell: Cell, seen: dict[tuple[Any, ...], Any], *, replay: bool
) -> _Rehearsal:
    run = experiment.run(cell.id)
    try:
        config = config_to_train(run)
        check(config, seen=seen)
    except DamagedError as error:
        raise UserError(str(error)) from error
    except ConfigError as error:
        raise UserError(f"{run.config_file}: {error.key}: {error.message}") from error
    return _Rehearsal(
        cell=cell, run=run, ranks=ranks_of(config), threads=config.site.threads, twin=twin_of(config)
    )


def _train(rehearsals: list[_Rehearsal], folder: Path, *, replay: bool) -> dict[str, str]:
    """Train twins in a folder. By each one's id why it failed; empty where it did not."""
    machine = replace(this_machine(), gpus=())
    tasks = []
    for rehearsal in rehearsals:
        run = Run(folder / f"{rehearsal.twin_id}")
        run.folder.mkdir()
        run.config_file.write_text(config_text(rehearsal.twin), encoding="utf-8")
        resources = resources_of(rehearsal.twin, replay=replay, machine=machine)
        tasks.append(Task(run, resources, STEPS, wants_gpus=False, grace=rehearsal.twin.site.grace))
    with shown_progress() as progress:
        statuses = Launcher(tasks, machine=machine, max_parallel=None, replay=replay, progress=progress).run()
    return {
        task.run.id: "" if status.state == State.COMPLETED else status.reason
        for task, status in zip(tasks, statuses, strict=True)
    }
