"""From a template to its cells, each a resolved run configuration. Deterministic: same template, same order.

A cell is the base, then its values on the axes, then every override whose `when` it meets, in order; last,
what its model's template recommends and none of these has set.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncpp_cli.errors import UserError
from asyncpp_cli.runs import Cell
from asyncpp_cli.settings import (
    LIST_KEYS,
    SettingError,
    assign,
    config_hash,
    copy_of,
    get,
    unset_keys,
)
from asyncpp_cli.template_file import SHORTHANDS, Settings, Template, settings_of
from asyncpp_cli.templates import recommended_settings
from stages.config import RunConfig

MOST_CELLS = 100_000
"""A product beyond this is taken for a mistake."""

ALWAYS_AXES = ("schedule", "optimizer", "error_feedback", "model", "seed")
"""The axes that every cell states, whether they vary or not."""


@dataclass(frozen=True)
class ResolvedCell:
    """A cell with the configuration of its run."""

    cell: Cell
    config: RunConfig


def expand(template: Template, *, pinned: bool = True) -> list[ResolvedCell]:
    """The cells of a template, in order: the product of the axes (first axis outermost), then `include`.

    Args:
        template: what is asked for.
        pinned: whether the data is looked at and its checksum made a part of each run; else it need not be
            there, and the ids are not those of runs.

    Raises:
        UserError: a key or value is not accepted, a setting is missing, two cells are the same run, or there
            is no cell.
    """
    further = [key for key in _axis_keys(template) if key not in ALWAYS_AXES]
    cells: list[ResolvedCell] = []
    seen: dict[str, str] = {}
    known: dict[tuple[Any, ...], str] = {}
    for config in _configs(template):
        if missing := unset_keys(config):
            raise UserError(f"{template.source}: {missing[0]} is not set")
        if pinned:
            _pin_data(config, template, known)
        axes = {key: _on_axis(get(config, SHORTHANDS.get(key, key))) for key in (*ALWAYS_AXES, *further)}
        digest = config_hash(config)
        cell = Cell(id=run_id(axes, digest), axes=axes)
        if digest in seen:
            raise UserError(f"{template.source}: two cells of the matrix are the same run ({describe(axes)})")
        seen[digest] = cell.id
        cells.append(ResolvedCell(cell, config))
    if not cells:
        raise UserError(f"{template.source}: the matrix has no cell left (exclude takes all of them)")
    return cells


def _on_axis(value: Any) -> Any:
    """A value as cells are told apart by it: a list as text, 3-1."""
    return "-".join(map(str, value)) if isinstance(value, list) else value


def check(template: Template, cells: list[ResolvedCell]) -> None:
    """Refuse the template if any of its cells could not be trained.

    Raises:
        UserError: names the file, the key and the first such cell.
    """
    from stages.check import ConfigError
    from stages.check import check as check_config
    from stages.initial_weights import InitError, check_init

    checked: set[str] = set()
    seen: dict[tuple[Any, ...], Any] = {}
    for resolved in cells:
        # What a seed is does not decide whether a run can be trained.
        text = repr(replace(resolved.config, seed=0))
        if text in checked:
            continue
        checked.add(text)
        try:
            check_config(resolved.config, seen=seen)
            if resolved.config.model.init is not None:
                if resolved.config.model.factory is not None:
                    raise InitError("is for the decoder of stages.model, and model.factory makes another")
                # Here and not among the run's checks: one that goes on from a checkpoint needs them no more.
                check_init(resolved.config.model)
        except ConfigError as error:
            cell = describe(resolved.cell.axes)
            raise UserError(f"{template.source}: {error.key}: {error.message} (cell {cell})") from error
        except InitError as error:
            cell = describe(resolved.cell.axes)
            raise UserError(f"{template.source}: model.init: {error} (cell {cell})") from error


def describe(axes: Mapping[str, Any]) -> str:
    """The axes in one line, for messages."""
    return ", ".join(f"{key}={value}" for key, value in axes.items())


def _axis_keys(template: Template) -> list[str]:
    axes = [template.matrix, *template.zip, *template.include]
    return list(dict.fromkeys(key for settings in axes for key in settings))


def _configs(template: Template) -> Iterator[RunConfig]:
    base = RunConfig()
    _apply(base, template.base, template, where="")
    points: Iterator[tuple[Settings, bool]] = itertools.chain(
        ((point, True) for point in _product(template)), ((point, False) for point in template.include)
    )
    for point, of_product in points:
        config = copy_of(base)
        _apply(config, point, template, where="matrix: " if of_product else "include: ")
        if of_product and any(_meets(config, left_out, template) for left_out in template.exclude):
            continue
        said = template.base | point
        for override in template.overrides:
            if _meets(config, override.when, template):
                _apply(config, override.set, template, where="overrides: ")
                said |= override.set
        if "model" in said:
            recommended = recommended_settings(said["model"], template.folder)
            named = {SHORTHANDS.get(key, key) for key in said}
            assign(config, {key: value for key, value in recommended.items() if key not in named})
        if config.data.path is not None:
            # A job may start in another folder than the one that the path was written for.
            config.data.path = str(Path(config.data.path).expanduser().absolute())
        if config.model.init is not None:
            _pin_initial_weights(config, template)
        yield config


def _pin_initial_weights(config: RunConfig, template: Template) -> None:
    """Make the weights that a run starts from a part of what it is."""
    from stages.initial_weights import InitError, content_sha256

    path = Path(str(config.model.init)).expanduser().absolute()
    try:
        found = content_sha256(path)
    except InitError as error:
        raise UserError(f"{template.source}: model.init: {error}") from error
    if config.model.init_sha256 not in (None, found):
        raise UserError(f"{template.source}: model.init_sha256: {path} holds other weights ({found})")
    config.model.init, config.model.init_sha256 = str(path), found


def _pin_data(config: RunConfig, template: Template, known: dict[tuple[Any, ...], str]) -> None:
    """Make the data that a run trains on, wherever it lies, a part of what it is."""
    from stages.corpus import DataError, find_corpus

    data = config.data
    if not 0 < data.validation_share < 1:
        return  # `check` says so
    key = (data.path, data.validation_share)
    try:
        if key not in known:
            known[key] = find_corpus(data).sha256
    except DataError as error:
        raise UserError(f"{template.source}: data.path: {error}") from error
    if data.sha256 not in (None, known[key]):
        where = data.path or "the Python standard library"
        raise UserError(f"{template.source}: data.sha256: {where} holds other data ({known[key]})")
    data.sha256 = known[key]


def _product(template: Template) -> Iterator[Settings]:
    if template.include and not template.matrix and not template.zip:
        return
    axes: list[list[Settings]] = [
        [{key: value} for value in values] for key, values in template.matrix.items()
    ]
    for group in template.zip:
        axes.append([dict(zip(group, values, strict=True)) for values in zip(*group.values(), strict=True)])
    count = 1
    for axis in axes:
        count *= len(axis)
    if count > MOST_CELLS:
        raise UserError(
            f"{template.source}: the matrix has {count:,} cells; at most {MOST_CELLS:,} are accepted"
        )
    for parts in itertools.product(*axes):
        point: Settings = {}
        for part in parts:
            point |= part
        yield point


def _apply(config: RunConfig, settings: Settings, template: Template, *, where: str) -> None:
    # A shorthand first: `model` sets a whole section, of which `model.layers` then changes a part.
    for key in sorted(settings, key=lambda key: "." in key):
        try:
            assign(config, settings_of(key, settings[key], folder=template.folder))
        except SettingError as error:
            raise UserError(f"{template.source}: {where}{error.key}: {error}") from error


def _meets(config: RunConfig, condition: Mapping[str, Any], template: Template) -> bool:
    """Whether the configuration has, for each key, the value (or one of the values) of the condition."""
    return all(_has(config, key, wanted, template) for key, wanted in condition.items())


def _has(config: RunConfig, key: str, wanted: Any, template: Template) -> bool:
    dotted = SHORTHANDS.get(key, key)
    actual = get(config, dotted)
    any_of = isinstance(wanted, list) and not (dotted in LIST_KEYS and wanted and isinstance(wanted[0], int))
    for value in wanted if any_of else [wanted]:
        try:
            if actual == settings_of(key, value, folder=template.folder)[dotted]:
                return True
        except SettingError as error:
            raise UserError(f"{template.source}: {error.key}: {error}") from error
    return False


def run_id(axes: Mapping[str, Any], digest: str) -> str:
    """A run's id: its axes for people, and the beginning of its hash."""
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
    return f"{readable[:120]}-{digest[:8]}"


def _short(value: Any) -> str:
    return value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else str(value)
