"""Parses the settings of a template: each once, however many cells have it, and names all mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import schedules
from asyncpp_cli.base.console import refuse_all
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.experiment.interpolation import is_interpolated
from asyncpp_cli.experiment.shipped import Model, read_model
from asyncpp_cli.experiment.template import (
    OWN_KEYS,
    SHORTHANDS,
    Settings,
    Template,
    accepted_values,
    conditions,
    misspelt,
)
from asyncpp_cli.runs.settings import SECTIONS, SettingError, accepted, check_key
from optimizers import NAMES as OPTIMIZERS


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Which cells an exclusion or override is for."""

    place: str
    """In the template."""
    written: Mapping[str, Any]
    accepted: Mapping[str, list[Any]]
    """The values that a cell may have, by dotted key."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The settings that make a template's cells.

    Settings are typed values by dotted key; those that refer to others are still text. A model that the
    template names or describes is a `Model` under the key `model`.
    """

    base: Settings
    axes: list[list[Settings]]
    """The points of each axis."""
    include: list[Settings]
    exclude: list[Condition]
    overrides: list[tuple[Condition, Settings]]


def parse(template: Template) -> Grid:
    """The settings of a template.

    Raises:
        UserError: some are not accepted. Of several all but the last are printed.
    """
    parser = _Parser(template)
    base = parser.layer("", template.base)
    # An axis of the matrix is a group of one.
    groups = [*({key: values} for key, values in template.matrix.items()), *template.zip]
    axes = [
        [
            parser.layer("matrix: ", dict(zip(group, values, strict=True)))
            for values in zip(*group.values(), strict=True)
        ]
        for group in groups
    ]
    include = [parser.layer("include: ", each) for each in template.include]
    when = {place: parser.condition(place, written) for place, written in conditions(template).items()}
    overrides = [
        (when.pop(f"overrides[{number}].when"), parser.layer("overrides: ", override.set))
        for number, override in enumerate(template.overrides)
    ]
    parser.note_unset()
    refuse_all(list(parser.problems.values()))
    return Grid(base=base, axes=axes, include=include, exclude=list(when.values()), overrides=overrides)


class _Parser:
    """Parses settings one by one, and collects what is wrong with them."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._given: set[str] = set()
        self.problems: dict[str, str] = {}
        """Lines for the user, by what is wrong: a change of the command line stands in several places."""

    def layer(self, where: str, settings: Settings) -> Settings:
        """Settings that stand together, at a place that messages begin with."""
        self._given |= settings.keys()
        # Shorthands first: `model` sets a whole section, which `model.layers` then changes in part.
        keys = sorted(settings, key=lambda key: "." in key)
        return {name: each for key in keys for name, each in self._setting(where, key, settings[key]).items()}

    def condition(self, place: str, written: Mapping[str, Any]) -> Condition:
        """The cells that what is written at a place of the template is for."""
        accepted: dict[str, list[Any]] = {}
        for key, values in written.items():
            dotted = SHORTHANDS.get(key, key)
            accepted[dotted] = []
            for value in accepted_values(key, values):
                settings = self._setting(f"{place}: ", key, value)
                # A model counts by its name; one whose name only the cell knows, as it is written.
                named = with_model(settings).get(dotted, settings.get(key))
                accepted[dotted].append(named)
        return Condition(place=place, written=written, accepted=accepted)

    def note_unset(self) -> None:
        """Beside other problems, name what every template sets and this one does not."""
        if not self.problems or any(map(misspelt, self._template.base)):
            return
        for key, names in (("schedule", tuple(schedules.KNOWN)), ("optimizer", OPTIMIZERS)):
            suggested = any(f"did you mean {key}?" in problem for problem in self.problems)
            if key not in self._given and not suggested:
                line = f"{self._template.source}: {key} is not set; accepted: {', '.join(names)}"
                self.problems[key] = line

    def _setting(self, where: str, key: str, value: Any) -> Settings:
        template = self._template
        # What the command line set is not to be looked for in the file.
        source = "command line" if (where, key) in template.changed else template.source
        try:
            if near := misspelt(key):
                raise SettingError(key.partition(".")[0], f"unknown key; did you mean {near}?")
            return settings_of(key, value, folder=template.folder)
        except SettingError as error:
            line = f"{source}: {where}{error.key}: {error}"
            outside_sections = not where and key.partition(".")[0] not in (*SECTIONS, "seed")
            if outside_sections and "accepted: " in str(error):
                line += f" (also: {', '.join(OWN_KEYS)})"  # it may be meant as a key of the template itself
            self.problems.setdefault(f"{error.key}: {error}", line)
        except UserError as error:
            self.problems[str(error)] = f"{source}: {where}{key}: {error}"
        return {}


def settings_of(key: str, value: Any, *, folder: Path) -> Settings:
    """What a key of a template sets (see `Grid`).

    Args:
        key: in a template.
        value: of the key.
        folder: to which a model's file may be relative, too.

    Raises:
        SettingError: the key is unknown, or does not accept the value.
        UserError: the model is unknown.
    """
    if key in SECTIONS and key not in SHORTHANDS:
        raise SettingError(key, f"is a section: set {key}.{SECTIONS[key][0]} or another of its keys")
    if key == "model":
        return _model_of(value, folder)
    if key == "error_feedback" and isinstance(value, bool):
        value = 1.0 if value else 0.0
    dotted = SHORTHANDS.get(key, key)
    check_key(dotted)
    return {dotted: value if is_interpolated(value) else accepted(dotted, value)}


def _model_of(value: Any, folder: Path) -> Settings:
    """A model by name, file or shape; as it is written, where its name is known in the cell alone."""
    name = value.get("base") if isinstance(value, Mapping) else value
    if is_interpolated(name):
        return {"model": value}
    if isinstance(value, str):
        return {"model": read_model(value, beside=folder)}
    if not isinstance(value, Mapping):
        raise SettingError("model", f"takes a model's name, file or shape, not {value!r}")
    model = Model(settings={}, recommended={})
    if name is not None:
        model = replace(read_model(str(name), beside=folder), name_prefix=f"{Path(str(name)).stem}-")
    own: Settings = {"model": replace(model, settings=model.settings | {"model.name": ""})}
    for key in value.keys() - {"base"}:
        own |= settings_of(f"model.{key}", value[key], folder=folder)
    return own


def with_model(settings: Settings) -> Settings:
    """The settings over those of their model, by dotted key."""
    model = settings.get("model")
    own = {key: value for key, value in settings.items() if key != "model"}
    return model.settings | own if isinstance(model, Model) else own
