"""Experiments that continue the runs of another: more steps, or another layout, from their checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

import schedules
from asyncpp_cli.base.atomic_files import new_folder, write_record, write_text
from asyncpp_cli.base.console import command
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.experiment.matrix import axis_value, run_id
from asyncpp_cli.experiment.own_code import CodeCopies
from asyncpp_cli.experiment.run_data import config_to_train, naming_config, owners_of
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.config_file import config_text
from asyncpp_cli.runs.experiment_folder import Cell, Experiment, write_experiment
from asyncpp_cli.runs.run_folder import LINEAGE_FILE, Lineage, Run, run_hash
from asyncpp_cli.runs.settings import config_hash, get, refused_at, with_settings
from asyncpp_cli.runs.status import State
from stages.checkpoint.files import (
    CheckpointError,
    Owner,
    check_owner,
    damage,
    folder_of,
    read_index,
    read_manifest,
)
from stages.config.run_config import RunConfig, changed
from stages.resolve.checks import ConfigError, check
from stages.update.lr_schedule import learning_rate_factor

SHORT_NAMES = {"steps": "train.steps", "stages": "parallel.stages", "data": "parallel.data"}
"""Keys by the options of `asyncpp extend`."""

_CHANGEABLE = (
    *("train.steps", "parallel.stages", "parallel.data", "parallel.cut", "schedule.microbatches"),
    *("schedule.name", "schedule.replicas", "schedule.keep_weights", "schedule.reduce_each"),
    *("train.eval_interval", "train.checkpoint_interval", "train.max_skipped"),
    *("optimizer.lr", "optimizer.schedule", "optimizer.final_lr", "optimizer.decay_share"),
)
"""Keys that a continuation may change: they need no other state than a checkpoint has."""


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A run to be, and the checkpoint that it starts from."""

    parent: Run
    cell: Cell
    config: RunConfig
    old: RunConfig
    lineage: Lineage

    @property
    def learning_rate(self) -> str:
        """What the change means for the learning rate, for people."""
        step = self.lineage.step
        rates = [
            config.optimizer.lr * learning_rate_factor(config.optimizer, step=at, steps=config.train.steps)
            for config, at in ((self.old, max(0, step - 1)), (self.config, step))
        ]
        steps = self.config.train.steps
        schedule = self.config.optimizer.schedule
        return (
            f"the learning rate was {rates[0]:.3g} in step {step} and is {rates[1]:.3g} in step {step + 1}: "
            f"from there on it is that of {schedule} over {steps} steps"
        )


def continuations(
    experiment: Experiment, runs: Sequence[Run], *, changes: Mapping[str, Any]
) -> list[Continuation]:
    """Check that runs can be continued with these changes. Writes nothing.

    Args:
        experiment: of the runs.
        runs: to continue.
        changes: new values by configuration key. If `parallel.data` changes and `schedule.microbatches` does
            not, the micro-batches are divided anew, so that a step has the same tokens.

    Raises:
        UserError: a run is running, has no valid checkpoint or nothing left to train, or a change is not
            accepted.
    """
    for key in changes:
        if key not in _CHANGEABLE:
            raise UserError(f"{key} cannot change while a run continues; accepted: {', '.join(_CHANGEABLE)}")
    cells = {cell.id: cell for cell in experiment.cells}
    return [_continuation(run, cells[run.id], experiment, changes) for run in runs]


def write_continuations(
    continued: Sequence[Continuation], experiment: Experiment, *, out: Path
) -> Experiment:
    """Write a new experiment with these runs, each with its parent's checkpoint.

    Checkpoints are linked where both folders are on one filesystem, and copied otherwise.

    Raises:
        UserError: `out` is not new or empty.
    """
    made = replace(
        experiment,
        folder=out,
        name=out.absolute().name,
        cells=tuple(each.cell for each in continued),
    )
    with new_folder(out) as temporary:
        copies = CodeCopies()
        staged = replace(made, folder=temporary)
        for each in continued:
            run = staged.run(each.cell.id)
            run.folder.mkdir(parents=True)
            write_text(run.config_file, config_text(each.config))
            copies.write(run, each.config)
            write_record(run.folder / LINEAGE_FILE, each.lineage)
            source = folder_of(each.parent.checkpoints, each.lineage.step)
            _link(source, folder_of(run.checkpoints, each.lineage.step))
            if (problem := _damage(run, each.lineage.step)) is not None:
                raise UserError(f"{each.parent.id}: {problem}")
        for file in (experiment.own_template, experiment.resolved_template):
            if file.is_file():
                shutil.copyfile(file, temporary / file.name)
        write_experiment(staged)
    return made


def _named(run: Run) -> Path:
    return run.folder.parents[1] / run.id


def _continuation(run: Run, cell: Cell, experiment: Experiment, changes: Mapping[str, Any]) -> Continuation:
    status = current_status(run)
    if status.state == State.RUNNING:
        raise UserError(f"{run.id} is running: wait for its end, or {command('cancel', _named(run))}")
    with naming_config(run):
        old = config_to_train(run)
    step = run.saved_step
    if not step:
        raise UserError(f"{run.id} has no checkpoint to continue from: {run.checkpoints}")
    if (problem := _damage(run, step)) is not None:
        raise UserError(f"{run.id}: {problem}")
    saved_by = _saved_by(run, step)
    config = _changed(run, old, changes)
    if config.train.steps <= step:
        raise UserError(
            f"{run.id} has a checkpoint of step {step}, and train.steps would be {config.train.steps}: "
            "nothing is left to train; give more --steps"
        )
    differing = [key for key in _CHANGEABLE if get(old, key) != get(config, key)]
    # As the file holds them, which has lists.
    written = msgspec.json.encode({key: (get(old, key), get(config, key)) for key in differing})
    changed = msgspec.json.decode(written, type=dict[str, tuple[Any, Any]])
    if not changed:
        raise UserError(
            f"{run.id}: nothing would change; to resume it as it is: {command('launch', _named(run))}"
        )
    lineage = Lineage(
        experiment=str(experiment.folder.absolute()),
        run=run.id,
        step=step,
        steps=old.train.steps,
        changed=changed,
        saved_by=saved_by,
    )
    axes = {key: changed[key][1] if key in changed else value for key, value in cell.axes.items()}
    axes |= {key: axis_value(new) for key, (_, new) in changed.items() if key.startswith("parallel.")}
    axes["continues"] = lineage.label
    digest = run_hash(config_hash(config), continues=(run.id, step))
    new_cell = Cell(id=run_id(axes, digest), axes=axes)
    return Continuation(parent=run, cell=new_cell, config=config, old=old, lineage=lineage)


def _changed(run: Run, old: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """The configuration with the changes.

    Raises:
        UserError: it is not accepted.
    """
    with refused_at(""):
        config = with_settings(old, changes)
    if "schedule.microbatches" not in changes and config.parallel.data != old.parallel.data:
        microbatches, rest = divmod(
            old.schedule.microbatches * old.parallel.data, max(1, config.parallel.data)
        )
        if rest:
            raise UserError(
                f"{run.id}: a step has {old.schedule.microbatches * old.parallel.data} micro-batches, which "
                f"{config.parallel.data} data ranks cannot share evenly"
            )
        config = changed(config, {"schedule.microbatches": microbatches})
    if config.schedule.microbatches * config.parallel.data != old.schedule.microbatches * old.parallel.data:
        raise UserError(
            f"{run.id}: the tokens of a step must stay the same, since they give the place in the data"
        )
    if config.schedule.name != old.schedule.name and not all(map(_flushes, (old, config))):
        raise UserError(
            f"{run.id}: schedule.name: a checkpoint of {old.schedule.name} has not the weight versions of "
            f"{config.schedule.name}; accepted: from one synchronous schedule to another"
        )
    if config.parallel.stages != old.parallel.stages:
        if not _same_versions_everywhere(old.schedule.name):
            raise UserError(
                f"{run.id}: parallel.stages: under {old.schedule.name} the weight versions in a checkpoint "
                "belong to its stages; accepted: schedules with one delay for all stages"
            )
        if config.parallel.cut == old.parallel.cut:
            config = changed(config, {"parallel.cut": None})
    try:
        check(config)
    except ConfigError as error:
        raise UserError(f"{run.id}: {error.key}: {error.message.splitlines()[0]}") from error
    return config


def _flushes(config: RunConfig) -> bool:
    """Whether a run is synchronous from beginning to end: its checkpoints then have one weight version."""
    name = config.schedule.name
    return name in schedules.KNOWN and schedules.is_synchronous(name)


def _same_versions_everywhere(name: str) -> bool:
    """Whether all stages hold the same weight versions at a drain."""
    if schedules.is_custom(name):
        return False
    return schedules.find(name).default_interval is None


def _damage(run: Run, step: int) -> str | None:
    """What is wrong with a checkpoint, by its manifest; None if it is valid."""
    folder = folder_of(run.checkpoints, step)
    try:
        found = damage(folder, read_manifest(folder).items())
    except (CheckpointError, OSError, ValueError) as error:
        found = str(error)
    return None if found is None else f"{folder} is damaged: {found}"


def _saved_by(run: Run, step: int) -> Owner:
    """The run that a checkpoint names: this one, or the one whose checkpoint this one continues.

    Raises:
        UserError: it is another run's.
    """
    folder, owners = folder_of(run.checkpoints, step), owners_of(run)
    try:
        owner = check_owner(read_index(folder), owners)
    except CheckpointError as error:
        raise UserError(f"{run.id}: {folder}: {error}") from error
    assert owner is not None
    return owner


def _link(source: Path, target: Path) -> None:
    """Make a folder with the same files; a checkpoint's files are never written again."""
    target.mkdir(parents=True)
    group = target.stat().st_gid
    for file in sorted(source.iterdir()):
        try:
            if file.stat().st_gid != group:
                raise PermissionError(f"{file} is another group's, and so would be a link to it")
            os.link(file, target / file.name)
        except OSError:
            shutil.copyfile(file, target / file.name)
