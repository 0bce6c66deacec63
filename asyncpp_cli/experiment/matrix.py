"""Expands a template into its cells, each a resolved run configuration, in a deterministic order.

Later settings of a cell replace earlier ones: the base, its values on the axes, then the overrides whose
`when` it matches, in order. Recommendations of the model's template apply to keys that none of these sets.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

import schedules
from asyncpp_cli.base.console import refuse_all, say
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.experiment.interpolation import interpolated, is_interpolated
from asyncpp_cli.experiment.own_code import NOTHING, Confirmed, check_confirmed
from asyncpp_cli.experiment.shipped import MODEL_SHAPE, recommended_settings, template_names
from asyncpp_cli.experiment.speed_runs import loss_givers
from asyncpp_cli.experiment.template import (
    SHORTHANDS,
    Settings,
    Template,
    accepted_values,
    conditions,
    settings_of,
)
from asyncpp_cli.runs.experiment_folder import Cell
from asyncpp_cli.runs.run_folder import HASH_DIGITS
from asyncpp_cli.runs.settings import (
    SettingError,
    config_hash,
    get,
    typed,
    unset_keys,
    with_settings,
)
from optimizers import NAMES as OPTIMIZERS
from stages.config.run_config import DataConfig, ModelConfig, RunConfig, changed

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
            is left, or the template names code that is not confirmed. If it is data that cannot be read, what
            `check_cells` finds is named with it.
    """
    configs: list[RunConfig] = []
    made = list(_configs(template))
    check_confirmed((config for config, _ in made), confirmed, source=template.source)
    checksums: dict[tuple[Any, ...], str] = {}
    code: dict[tuple[Any, ...], dict[str, str]] = {}
    needed: dict[tuple[Any, ...], int] = {}
    missing_data: _MissingDataError | None = None
    for config, settings in made:
        if missing := unset_keys(config):
            section = missing[0].partition(".")[0]
            catalogues = {"schedule": tuple(schedules.KNOWN), "optimizer": OPTIMIZERS}
            accepted: Iterable[str] = catalogues.get(section, ())
            if section == "model" and not MODEL_SHAPE & {key.removeprefix("model.") for key in settings}:
                accepted = [*template_names("models"), "the path of a YAML file, or a model's shape"]
            key = min(missing, key="model.name".__eq__) if section == "model" and not accepted else missing[0]
            names = f"; accepted: {', '.join(accepted)}" if accepted else ""
            raise UserError(f"{template.source}: {key.removesuffix('.name')} is not set{names}")
        if pinned:
            own = _pinned_code(config, template, code)
            try:
                own |= _pinned_data(config.data, template, checksums)
            except _MissingDataError as error:
                missing_data = error
            if "model.vocab_size" not in settings and config.model.init is None:
                own["model.vocab_size"] = _fitting_vocabulary(config, needed)
            config = changed(config, own)
        configs.append(config)
    givers: list[int | None] = [None] * len(configs)
    if template.speed_steps is not None:
        givers = loss_givers(configs, steps=template.speed_steps, source=template.source)
    axes = (*ALWAYS_AXES, *(key for key in _axis_keys(template) if key not in ALWAYS_AXES))
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
    if missing_data is not None:
        check_cells(template, list(cells.values()))
        raise missing_data
    return list(cells.values())


class _MissingDataError(UserError):
    """Data that cannot be read: what else is wrong is named with it."""


def _cell(config: RunConfig, axes: Sequence[str]) -> Cell:
    values = {key: axis_value(get(config, SHORTHANDS.get(key, key))) for key in axes}
    return Cell(id=run_id(values, config_hash(config)), axes=values)


def axis_value(value: Any) -> Any:
    """A value as a cell states it: a list as text, 3-1."""
    return "-".join(map(str, value)) if isinstance(value, list | tuple) else value


def check_cells(template: Template, cells: list[ResolvedCell]) -> None:
    """Check that every cell of the template can be trained.

    Raises:
        UserError: some cannot; names the file, the key and the first such cell. Cells that are refused for
            one reason share a line; of several reasons all but the last are printed.
    """
    from stages.resolve.checks import resolve
    from stages.resolve.facts import Resolved

    checked: dict[bytes, list[str]] = {}
    seen: dict[str, Any] = {}
    models: set[str] = set()
    """Those whose initial weights, or own code, have been looked at."""

    def reasons(config: RunConfig) -> list[str]:
        problems = resolve(config, seen=seen)
        if isinstance(problems, Resolved):
            problems = []
        found = [f"{error.key}: {line}" for error in problems for line in error.message.splitlines()]
        if config.model.factory is not None and not found:
            from stages.model.custom import FactoryError, check_causal

            try:
                if (model := f"{config.model} {config.data.context}") not in models:
                    why = check_causal(config.model, context=config.data.context)
                    models.add(model)
                    if why:
                        say(
                            f"note: {config.model.factory} cannot be computed here ({why}): it is not known "
                            "whether an output depends on later tokens"
                        )
            except FactoryError as error:
                return [f"model.factory: {error}"]
        if config.model.init is not None and not found:
            from stages.checkpoint.initial_weights import InitError, check_init, check_values

            try:
                if config.model.factory is not None:
                    raise InitError("is for the built-in decoder; model.factory builds another model")
                # Not a check of the run: one that resumes from a checkpoint does not need them.
                if (model := repr(config.model)) not in models:
                    check_init(config.model)
                    check_values(config.model)
                    models.add(model)
            except InitError as error:
                return [f"model.init: {error}"]
        return found

    refused: dict[str, list[ResolvedCell]] = {}
    for resolved in cells:
        # The seed does not decide whether a run can be trained.
        text = msgspec.json.encode(replace(resolved.config, seed=0))
        if text not in checked:
            checked[text] = reasons(resolved.config)
        for reason in checked[text]:
            refused.setdefault(reason, []).append(resolved)
    refuse_all([f"{template.source}: {reason} ({_counted(alike)})" for reason, alike in refused.items()])


def _counted(cells: Sequence[ResolvedCell]) -> str:
    """Which cells, for messages."""
    first = describe(cells[0].cell.axes)
    return f"cell {first}" if len(cells) == 1 else f"{len(cells)} cells; first {first}"


def describe(axes: Mapping[str, Any]) -> str:
    """The axes on one line, for messages."""
    return ", ".join(f"{key}={value}" for key, value in axes.items())


def _axis_keys(template: Template) -> list[str]:
    axes = [template.matrix, *template.zip, *template.include]
    return list(dict.fromkeys(key for settings in axes for key in settings))


def _configs(template: Template) -> Iterator[tuple[RunConfig, Settings]]:
    """Each cell's configuration, and the settings of the template that it has.

    Says which conditions of the template match no cell, but for those that are moot.
    """
    idle = {place: each for place, each in conditions(template).items() if place not in template.moot}
    base, base_layer = _applied(RunConfig(), template.base, {}, template, where="")
    points: Iterator[tuple[Settings, bool]] = itertools.chain(
        ((point, True) for point in _product(template)), ((point, False) for point in template.include)
    )
    for point, in_product in points:
        where = "matrix: " if in_product else "include: "
        config, pending = _applied(base, point, base_layer, template, where=where)
        excluding = [
            f"exclude[{number}]"
            for number, each in enumerate(template.exclude)
            if in_product and _matches(config, pending, each, template)
        ]
        for place in excluding:
            idle.pop(place, None)
        if excluding:
            continue
        settings = template.base | point
        for number, override in enumerate(template.overrides):
            if _matches(config, pending, override.when, template):
                idle.pop(f"overrides[{number}].when", None)
                config, pending = _applied(config, override.set, pending, template, where="overrides: ")
                settings |= override.set
        model = settings.get("model")
        shape = model if isinstance(model, Mapping) else {}
        named = _resolved_model(shape.get("base") if shape else model, config, template)
        if named is not None:
            recommended = recommended_settings(str(named), template.folder)
            given_keys = {SHORTHANDS.get(key, key) for key in settings}
            own = {key: value for key, value in recommended.items() if key not in given_keys}
            config = with_settings(config, own)
        config = _with_interpolated(config, pending, template)
        if not config.model.name:
            start = f"{Path(shape['base']).stem}-" if "base" in shape else ""
            name = f"{start}{config.model.layers}x{config.model.width}"
            config = changed(config, {"model.name": name})
        settings = settings | {f"model.{key}": value for key, value in shape.items()}
        config = replace(config, data=_with_full_paths(config.data))
        if config.model.init is not None:
            config = changed(config, _pinned_initial_weights(config.model, template))
        yield config, settings
    for place, condition in idle.items():
        shown = {key: " or ".join(map(str, accepted_values(key, each))) for key, each in condition.items()}
        say(f"note: {template.source}: {place} ({describe(shown)}) matches no cell")


def _with_full_paths(data: DataConfig) -> DataConfig:
    """With full paths: a job may start in another working folder."""

    def full(path: str) -> str:
        return str(Path(path).expanduser().absolute())

    return replace(
        data,
        path=None if data.path is None else full(data.path),
        sources={name: full(path) for name, path in data.sources.items()},
        weights={**dict.fromkeys(data.sources, 1.0), **data.weights},
        validation={name: full(path) for name, path in data.validation.items()},
    )


def _pinned_initial_weights(model: ModelConfig, template: Template) -> Settings:
    """The full path of the initial weights, and their checksum."""
    from stages.checkpoint.initial_weights import InitError, content_sha256

    path = Path(str(model.init)).expanduser().absolute()
    try:
        checksum = content_sha256(path)
    except InitError as error:
        raise UserError(f"{template.source}: model.init: {error}") from error
    if model.init_sha256 not in (None, checksum):
        raise UserError(f"{template.source}: model.init_sha256: {path} holds other weights ({checksum})")
    return {"model.init": str(path), "model.init_sha256": checksum}


def _pinned_data(data: DataConfig, template: Template, checksums: dict[tuple[Any, ...], str]) -> Settings:
    """The checksums of the data; `checksums` caches those computed."""
    from stages.data.dataset import DataError, find_corpus, find_validation_set, where_of

    if not 0 < data.validation_share < 1:
        return {}  # `check_cells` reports it
    key = (*data.trained_paths.items(), data.validation_share, data.dtype)
    try:
        if key not in checksums:
            checksums[key] = find_corpus(data).sha256
    except DataError as error:
        raise _MissingDataError(f"{template.source}: {error.key}: {error}") from error
    if data.sha256 not in (None, checksums[key]):
        raise UserError(
            f"{template.source}: data.sha256: {where_of(data)} holds other data ({checksums[key]})"
        )
    pinned: dict[str, str] = {}
    for name, path in data.validation.items():
        try:
            if (path, data.dtype) not in checksums:
                checksums[path, data.dtype] = find_validation_set(path, dtype=data.dtype).sha256
        except DataError as error:
            raise UserError(f"{template.source}: data.validation.{name}: {error}") from error
        pinned[name] = checksums[path, data.dtype]
    if wrong := [name for name, known in data.validation_sha256.items() if pinned.get(name) != known]:
        raise UserError(
            f"{template.source}: data.validation_sha256.{wrong[0]}: data.validation.{wrong[0]} holds other "
            f"data ({pinned.get(wrong[0])})"
        )
    return {"data.sha256": checksums[key], "data.validation_sha256": pinned}


def _pinned_code(
    config: RunConfig, template: Template, known: dict[tuple[Any, ...], dict[str, str]]
) -> Settings:
    """The hashes of the cell's own code; `known` caches those computed."""
    from stages.config.own_code import code_sha256, own_code

    key = (config.schedule.name, config.optimizer.name, config.model.factory)
    if key not in known:
        known[key] = {section: code_sha256(files) for section, files in own_code(config).items()}
    for section in ("schedule", "optimizer", "model"):
        current = known[key].get(section)
        given = getattr(config, section).code_sha256
        if given not in (None, current):
            raise UserError(f"{template.source}: {section}.code_sha256: the code is now another ({current})")
    return {f"{name}.code_sha256": known[key].get(name) for name in ("schedule", "optimizer", "model")}


def _fitting_vocabulary(config: RunConfig, needed: dict[tuple[Any, ...], int]) -> int:
    """The vocabulary of a model that the template did not give one: its own, or a larger one that its data
    needs. A larger one of its own stays: it is part of a published shape."""
    from stages.data.dataset import DataError, vocabulary

    data = config.data
    key = (*data.trained_paths.items(), data.validation_share, data.context, *data.validation.values())
    if key not in needed:
        try:
            needed[key] = vocabulary(data)
        except (DataError, ValueError):
            needed[key] = 0  # `check_cells` reports it
        if needed[key] > config.model.vocab_size:
            say(f"note: model.vocab_size is {needed[key]}, as the data needs; {config.model.name} has fewer")
    return max(config.model.vocab_size, needed[key])


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


def _applied(
    config: RunConfig, settings: Settings, pending: Settings, template: Template, *, where: str
) -> tuple[RunConfig, Settings]:
    """A cell with further settings, but for interpolated ones.

    Args:
        config: of the cell.
        settings: to set.
        pending: interpolated settings that were given before.
        template: of the cell.
        where: in the template, for messages.

    Returns:
        Its configuration, and the interpolated settings that hold now.
    """
    # Shorthands first: `model` sets a whole section, which `model.layers` then changes in part.
    for key in sorted(settings, key=lambda key: "." in key):
        value = settings[key]
        try:
            if key == "model":
                pending = {known: each for known, each in pending.items() if not known.startswith("model.")}
                value = _resolved_model(value, config, template)
            known = settings_of(key, value, folder=template.folder)
            plain = {name: each for name, each in known.items() if not is_interpolated(each)}
            pending = {name: each for name, each in pending.items() if name not in plain}
            if len(plain) < len(known):
                pending |= {name: each for name, each in known.items() if name not in plain}
            config = with_settings(config, plain)
        except SettingError as error:
            raise UserError(f"{template.source}: {where}{error.key}: {error}") from error
    return config, pending


def _resolved_model(value: Any, config: RunConfig, template: Template) -> Any:
    """A model, or the one that a shape starts from, by name."""
    if isinstance(value, Mapping) and "base" in value:
        return {**value, "base": _resolved_model(value["base"], config, template)}
    if isinstance(value, str) and is_interpolated(value):
        return interpolated({"model.name": value}, config, template.variables)["model.name"]
    return value


def _with_interpolated(config: RunConfig, pending: Settings, template: Template) -> RunConfig:
    """With the settings that refer to others, when these are known."""
    if not pending:
        return config
    try:
        return with_settings(config, interpolated(pending, config, template.variables))
    except SettingError as error:
        written = pending.get(error.key)
        by = f" ({written})" if isinstance(written, str) and written not in str(error) else ""
        raise UserError(f"{template.source}: {error.key}: {error}{by}") from error


def _matches(config: RunConfig, pending: Settings, condition: Mapping[str, Any], template: Template) -> bool:
    """Whether a cell has the condition's value, or one of its values, for each key."""
    return all(_has_value(config, pending, key, value, template) for key, value in condition.items())


def _has_value(config: RunConfig, pending: Settings, key: str, accepted: Any, template: Template) -> bool:
    dotted = SHORTHANDS.get(key, key)

    def plain(value: Any) -> Any:
        if not is_interpolated(value):
            return settings_of(key, value, folder=template.folder)[dotted]
        return typed(dotted, interpolated({**pending, dotted: value}, config, template.variables)[dotted])

    try:
        actual = plain(pending[dotted]) if dotted in pending else get(config, dotted)
        return any(actual == plain(value) for value in accepted_values(key, accepted))
    except SettingError as error:
        raise UserError(f"{template.source}: {error.key}: {error}") from error


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
