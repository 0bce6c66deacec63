"""Expands a template into its cells, each a resolved run configuration, in a deterministic order.

Later settings of a cell replace earlier ones: the base, its values on the axes, then the overrides whose
`when` it matches, in order. Recommendations of the model's template apply to keys that none of these sets.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

import schedules
from asyncpp_cli.base.console import say
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.experiment.interpolation import interpolated, is_interpolated
from asyncpp_cli.experiment.own_code import NOTHING, Confirmed, check_confirmed
from asyncpp_cli.experiment.parsing import Condition, Grid, parse, settings_of, with_model
from asyncpp_cli.experiment.pins import Pins
from asyncpp_cli.experiment.shipped import MODEL_SHAPE, Model, template_names
from asyncpp_cli.experiment.speed_runs import loss_givers
from asyncpp_cli.experiment.template import SHORTHANDS, Settings, Template, accepted_values
from asyncpp_cli.runs.experiment_folder import Cell
from asyncpp_cli.runs.run_folder import HASH_DIGITS
from asyncpp_cli.runs.settings import (
    DEFAULTS,
    SettingError,
    config_hash,
    get,
    refused_at,
    unset_keys,
    with_typed,
)
from optimizers import NAMES as OPTIMIZERS
from stages.config.run_config import RunConfig, changed

MOST_CELLS = 100_000
"""Cells of a template at most; more are taken for a mistake."""

ALWAYS_AXES = ("schedule", "optimizer", "error_feedback", "model", "seed")
"""Axes that every cell states, whether they vary or not."""


@dataclass(frozen=True)
class ResolvedCell:
    """A cell and the configuration of its run."""

    cell: Cell
    config: RunConfig


def expand(template: Template, *, pinned: bool = True, confirmed: Confirmed = NOTHING) -> list[ResolvedCell]:
    """The cells of a template, in order: the product of the axes (first axis outermost), then `include`.

    Args:
        template: to expand.
        pinned: whether to put the data's checksum into each configuration. Otherwise the data need not exist,
            and the ids are not those of runs.
        confirmed: the code that the template may name.

    Raises:
        UserError: a key or value is not accepted, a setting is missing, two cells are the same run, no cell
            is left, or the template names code that is not confirmed.
    """
    settings = list(_settings_of_cells(template, parse(template)))
    pins = Pins(template.source)
    configs = [pins.with_full_paths(_config_of(each, template)) for each in settings]
    check_confirmed(configs, confirmed, source=template.source)
    for config, own in zip(configs, settings, strict=True):
        _refuse_unset(config, own, template)
    if pinned:
        configs = [
            pins.pinned(config, own_vocabulary="model.vocab_size" in own)
            for config, own in zip(configs, settings, strict=True)
        ]
    givers: list[int | None] = [None] * len(configs)
    if template.speed_steps is not None:
        givers = loss_givers(configs, steps=template.speed_steps, source=template.source)
    groups = [template.matrix, *template.zip, *template.include]
    axes = tuple(dict.fromkeys([*ALWAYS_AXES, *(key for group in groups for key in group)]))
    cells: dict[str, ResolvedCell] = {}
    for config, giver in zip(configs, givers, strict=True):
        if giver is None:
            resolved = ResolvedCell(_cell(config, axes), config)
        else:
            shortened = changed(config, {"train.steps": template.speed_steps})
            loss_of = _cell(configs[giver], axes).id
            resolved = ResolvedCell(structs.replace(_cell(shortened, axes), loss_of=loss_of), shortened)
        known = resolved.cell.id in cells  # it ends in the hash of all that makes the run
        if known and giver is not None:
            continue  # the speed of an arm of several lengths
        if known:
            same = describe(resolved.cell.axes)
            raise UserError(f"{template.source}: two cells of the matrix are the same run ({same})")
        cells[resolved.cell.id] = resolved
    if not cells:
        raise UserError(f"{template.source}: the matrix has no cell left (exclude removes all of them)")
    return list(cells.values())


def _config_of(settings: Settings, template: Template) -> RunConfig:
    """The configuration of a cell, with what its model recommends."""
    model = settings.get("model")
    known = with_model(settings)
    if isinstance(model, Model):
        known = model.recommended | known
    config = with_typed(RunConfig(), _resolved(known, template))
    if isinstance(model, Model) and not config.model.name:
        name = f"{model.name_prefix}{config.model.layers}x{config.model.width}"
        config = changed(config, {"model.name": name})
    return config


def _refuse_unset(config: RunConfig, settings: Settings, template: Template) -> None:
    """Refuse a cell without a setting that has no default."""
    if not (missing := unset_keys(config)):
        return
    section = missing[0].partition(".")[0]
    catalogues = {"schedule": tuple(schedules.KNOWN), "optimizer": OPTIMIZERS}
    accepted: Iterable[str] = catalogues.get(section, ())
    if section == "model" and not MODEL_SHAPE & {key.removeprefix("model.") for key in settings}:
        accepted = [*template_names("models"), "the path of a YAML file, or a model's shape"]
    key = min(missing, key="model.name".__eq__) if section == "model" and not accepted else missing[0]
    names = f"; accepted: {', '.join(accepted)}" if accepted else ""
    raise UserError(f"{template.source}: {key.removesuffix('.name')} is not set{names}")


def _cell(config: RunConfig, axes: Sequence[str]) -> Cell:
    values = {key: axis_value(get(config, SHORTHANDS.get(key, key))) for key in axes}
    return Cell(id=run_id(values, config_hash(config)), axes=values)


def axis_value(value: Any) -> Any:
    """A value as a cell states it: a list as text, 3-1."""
    return "-".join(map(str, value)) if isinstance(value, list | tuple) else value


def describe(axes: Mapping[str, Any]) -> str:
    """The axes on one line, for messages."""
    return ", ".join(f"{key}={value}" for key, value in axes.items())


def _settings_of_cells(template: Template, grid: Grid) -> Iterator[Settings]:
    """What the template sets of each cell.

    Says which conditions of the template match no cell, but for those that are moot.
    """
    conditions = [*grid.exclude, *(when for when, _ in grid.overrides)]
    idle = {each.place: each for each in conditions if each.place not in template.moot}
    base = _over({}, grid.base, template)
    in_product = ((point, grid.exclude) for point in _product(template, grid))
    included: Iterator[tuple[Settings, list[Condition]]] = ((point, []) for point in grid.include)
    for point, exclude in itertools.chain(in_product, included):
        settings = _over(base, point, template)
        excluding = [each for each in exclude if _matches(settings, each, template)]
        for each in excluding:
            idle.pop(each.place, None)
        if excluding:
            continue
        for when, own in grid.overrides:
            if _matches(settings, when, template):
                idle.pop(when.place, None)
                settings = _over(settings, own, template)
        yield settings
    for place, condition in idle.items():
        written = condition.written.items()
        shown = {key: " or ".join(map(str, accepted_values(key, each))) for key, each in written}
        say(f"note: {template.source}: {place} ({describe(shown)}) matches no cell")


def _product(template: Template, grid: Grid) -> Iterator[Settings]:
    if grid.include and not grid.axes:
        return
    if (count := math.prod(map(len, grid.axes))) > MOST_CELLS:
        raise UserError(
            f"{template.source}: the matrix has {count:,} cells; at most {MOST_CELLS:,} are accepted"
        )
    for parts in itertools.product(*grid.axes):
        point: Settings = {}
        # What an axis sets of a model is over the model, which is another axis.
        for part in sorted(parts, key=lambda part: "model" not in part):
            point |= part
        yield point


def _over(below: Settings, above: Settings, template: Template) -> Settings:
    """A cell's settings with further ones over them.

    A model replaces what it sets itself, and what refers to other settings of the section.
    """
    if "model" not in above:
        return below | above
    model = above["model"]
    if not isinstance(model, Model):
        above = _named_model(model, below | with_model(above), template) | with_model(above)
        model = above["model"]
    kept = {
        key: value
        for key, value in below.items()
        if key not in model.settings and not (key.startswith("model.") and is_interpolated(value))
    }
    return kept | above


def _named_model(written: Any, settings: Settings, template: Template) -> Settings:
    """A model whose name, or the name of the one that its shape starts from, refers to other settings."""
    name = written["base"] if isinstance(written, Mapping) else written
    name = _resolved(with_model(settings) | {"model.name": name}, template)["model.name"]
    with refused_at(f"{template.source}: "):
        found = {**written, "base": name} if isinstance(written, Mapping) else name
        return settings_of("model", found, folder=template.folder)


def _matches(settings: Settings, condition: Condition, template: Template) -> bool:
    """Whether a cell has one of the values that the condition accepts, for each key."""
    known = with_model(settings)

    def plain(key: str, value: Any) -> Any:
        return _resolved({**known, key: value}, template)[key] if is_interpolated(value) else value

    return all(
        plain(key, known.get(key, DEFAULTS.get(key))) in [plain(key, value) for value in accepted]
        for key, accepted in condition.accepted.items()
    )


def _resolved(settings: Settings, template: Template) -> Settings:
    """Settings by dotted key, those that refer to others with their values."""
    try:
        return interpolated(settings, template.variables)
    except SettingError as error:
        written = settings.get(error.key)
        by = f" ({written})" if isinstance(written, str) and written not in str(error) else ""
        raise UserError(f"{template.source}: {error.key}: {error}{by}") from error


def run_id(axes: Mapping[str, Any], digest: str) -> str:
    """A run's id: its axes in readable form and the first digits of its hash (`runs.run_folder.run_hash`)."""
    parts = [
        axes["schedule"],
        axes["optimizer"],
        f"ef{axes['error_feedback']:g}",
        axes["model"],
        f"s{axes['seed']}",
        *(
            f"{key.rpartition('.')[2]}={_short(value)}"
            for key, value in axes.items()
            if key not in ALWAYS_AXES
        ),
    ]
    readable = re.sub(r"[^A-Za-z0-9._=-]+", "_", "-".join(str(part) for part in parts)).lstrip(".-")
    return f"{readable[:120]}-{digest[:HASH_DIGITS]}"


def _short(value: Any) -> str:
    return value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else str(value)
