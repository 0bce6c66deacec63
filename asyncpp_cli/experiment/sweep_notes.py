"""Notes of a sweep on cells that can be trained but may not be what was meant."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from asyncpp_cli.experiment.interpolation import environment_of
from asyncpp_cli.experiment.matrix import ResolvedCell
from asyncpp_cli.experiment.run_data import paths_of
from asyncpp_cli.experiment.template import Template
from optimizers import CORRECTIONS
from schedules.analyze import staleness
from stages.config.run_config import RunConfig
from stages.config.segments import update_interval
from stages.data.dataset import is_prepared
from stages.data.foreign_formats import find_shards
from stages.data.prepared import few_documents, read_prepared
from stages.data.text import files_left_out
from stages.resolve.facts import facts


def notes(cells: Sequence[ResolvedCell]) -> list[str]:
    """Notes on checked cells, one line each."""
    return [
        *_speed_runs(cells),
        *_more_updates(cells),
        *_notes_on_data(cells),
        *_ineffective_corrections(cells),
    ]


def environment_notes(template: Template) -> list[str]:
    """What a template's runs hold of the environment, one line for each variable."""
    names = [name for name in environment_of(vars(template)) if name in os.environ]
    return [f"{name} is {os.environ[name]!r} in the configurations, and stays so" for name in names]


def _speed_runs(cells: Sequence[ResolvedCell]) -> list[str]:
    """The cells that `speed_steps` shortened, by the schedule whose loss is theirs, too."""
    name_of = {resolved.cell.id: resolved.config.schedule.name for resolved in cells}
    short: dict[tuple[str, int], dict[str, None]] = {}
    for config, giver in ((resolved.config, resolved.cell.loss_of) for resolved in cells):
        if giver is not None:
            short.setdefault((name_of[giver], config.train.steps), {})[config.schedule.name] = None
    return [
        f"{', '.join(names)}: short runs of {steps:,} steps, made only for their speed; their loss is that "
        f"of {giver}"
        for (giver, steps), names in short.items()
    ]


def _more_updates(cells: Sequence[ResolvedCell]) -> list[str]:
    """The schedules that make more updates of the same tokens than other cells."""
    kinds: dict[tuple[str, float], RunConfig] = {}
    for config in (resolved.config for resolved in cells):
        per_step = config.schedule.microbatches / update_interval(config)
        kinds.setdefault((config.schedule.name, per_step), config)
    if len({per_step for _, per_step in kinds}) == 1:
        return []
    return [
        f"{name} makes {per_step:g} updates per step, {int(per_step * config.train.steps):,} in "
        f"{config.train.steps:,} steps; schedule.update_interval={config.schedule.microbatches} makes one, "
        "as synchronous schedules do"
        for (name, per_step), config in kinds.items()
        if per_step > 1
    ]


def _ineffective_corrections(cells: Sequence[ResolvedCell]) -> list[str]:
    idle: dict[str, list[str]] = {}
    for resolved in cells:
        config = resolved.config
        correction = CORRECTIONS.get(config.correction.name)
        if correction is not None and correction.idle_at_delay_one:
            program = facts(config).program(first_step=0, steps=4)
            if max(staleness(program).delay_max) <= 1:
                idle.setdefault(correction.name, []).append(resolved.cell.id)
    return [
        f"{same[0]}{f' and {len(same) - 1} more' if len(same) > 1 else ''}: correction {name} "
        f"{CORRECTIONS[name].idle_at_delay_one}, which is 1 at every stage here, so it changes nothing"
        for name, same in idle.items()
    ]


def _notes_on_data(cells: Sequence[ResolvedCell]) -> list[str]:
    """Splits of few documents, and files of a folder of text that are not read."""
    paths = dict.fromkeys(path for resolved in cells for path in paths_of(resolved.config.data).values())
    prepared = [read_prepared(Path(path)) for path in paths if is_prepared(Path(path))]
    lines = [warning for each in prepared if (warning := few_documents(each))]
    for path in paths:
        left_out = [] if is_prepared(Path(path)) or find_shards(Path(path)) else files_left_out(Path(path))
        if left_out:
            more = f" and {len(left_out) - 1} more" if left_out[1:] else ""
            lines.append(
                f"{path}: {left_out[0]}{more} not read: no text (`data prepare` reads compressed text)"
            )
    return lines
