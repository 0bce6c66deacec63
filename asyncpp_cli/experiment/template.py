"""Experiment templates: reads their files, the templates that these start from, and applies changes."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.experiment.shipped import MODEL_SHAPE, find_template
from asyncpp_cli.experiment.yaml_data import parse_value, read_mapping
from asyncpp_cli.runs.settings import (
    LIST_KEYS,
    SECTIONS,
    flatten,
    holds_text,
    refused_at,
)

Settings = dict[str, Any]
"""A value for each key (dotted, or a shorthand)."""

SHORTHANDS = {
    "schedule": "schedule.name",
    "optimizer": "optimizer.name",
    "error_feedback": "error_feedback.coefficient",
    "model": "model.name",
}
"""Keys that a section's name alone stands for; `model` also sets its whole section, from a model template or
from a mapping with the model's shape."""

_LONG_FORMS = {dotted: shorthand for shorthand, dotted in SHORTHANDS.items()}
_AXES_AND_CASES = ("matrix", "zip", "include", "exclude", "overrides", "set", "when")

_FEWEST_SPEED_STEPS = 10
"""Fewer say little about a speed."""


@dataclass(frozen=True)
class Override:
    """Settings for the cells that match `when` (all cells if it is empty)."""

    when: dict[str, Any]
    set: Settings


@dataclass(frozen=True, kw_only=True)
class Template:
    """A template's content. Keys of settings are canonical (`canonical`)."""

    source: str
    """The file, for messages."""
    folder: Path
    """The file's folder; relative paths of model files are resolved against it first."""
    name: str
    description: str
    base: Settings
    variables: dict[str, Any]
    """What `${variables.NAME}` stands for; no settings."""
    matrix: dict[str, list[Any]]
    """Values of each axis; the cells are their product."""
    zip: list[dict[str, list[Any]]]
    """Groups of axes that vary together; each group is one axis of the product."""
    include: list[Settings]
    """Cells added to the product."""
    exclude: list[dict[str, Any]]
    """Conditions of cells to remove from the product."""
    overrides: list[Override]
    speed_steps: int | None
    """Steps of synchronous cells whose loss another cell gives (`speed_runs`); None: all cells train to their
    end."""
    text: str | None = None
    """What came through a pipe; None: the text is that of the file `source`."""
    moot: frozenset[str] = frozenset()
    """Places of the file's conditions on keys to which the command line gave other values: who leaves out a
    schedule knows that its exceptions fall away."""
    changed: frozenset[tuple[str, str]] = frozenset()
    """What the command line set: part of the template, as messages name it, and key."""


_NO_KEYS = ("source", "folder", "text", "moot", "changed")
OWN_KEYS = tuple(each.name for each in fields(Template) if each.name not in _NO_KEYS)
"""Keys of a template that are no settings; in its file `base` names the template that it starts from."""


def canonical(key: str) -> str:
    """The canonical form of a key: `schedule` for `schedule.name`."""
    return _LONG_FORMS.get(key, key)


def parse_setting(key: str, text: str) -> Any:
    """The value in `KEY=TEXT`, read as YAML; as it is written, where the key holds text.

    Raises:
        UserError: the text is not YAML, or holds more than data.
    """
    place = tuple(key.split("."))
    return parse_value(text, where=f"{key}=", holds_text=lambda inner, _: _holds_text((*place, *inner)))


def _holds_text(place: tuple[str, ...], _: object = None) -> bool:
    """Whether a place in a template holds text; see `yaml_data.HoldsText`."""
    if place in (("name",), ("description",), ("base",)):
        return True
    while place and place[0] in _AXES_AND_CASES:
        place = place[1:]
    key = ".".join(place)
    return key == "model.base" or holds_text(SHORTHANDS.get(key, key))


def load(name: str, changes: Iterable[str]) -> Template:
    """Load a template by name, file or pipe (`-`, `<(command)`) and apply the changes `KEY=VALUE` of the
    command line.

    Raises:
        UserError: there is no such template, or its content or a change is not accepted.
    """
    text = None
    if name == "-":
        text = sys.stdin.read()
    # A named pipe may have no writer: reading it would wait.
    elif name.startswith(("/dev/", "/proc/")) and Path(name).is_fifo():
        text = Path(name).read_text(encoding="utf-8")
    file = find_template("experiments", name, beside=None) if text is None else _PIPE
    written = template = _loaded(file, (), text)
    changed = set()
    for change in changes:
        template = _changed(template, change)
        section, _, rest = change.lstrip("+").partition("=")[0].partition(".")
        key = canonical(rest) if section == "matrix" else canonical(f"{section}.{rest}".rstrip("."))
        changed.add(("matrix: " if section == "matrix" else "", key))
    return replace(template, text=text, changed=frozenset(changed), moot=frozenset(_moot(written, template)))


def _moot(written: Template, template: Template) -> Iterator[str]:
    before, after = _values_of(written), _values_of(template)
    others = {key for key in before | after if before.get(key) != after.get(key)}
    own = conditions(written)
    for place, condition in conditions(template).items():
        if condition == own.get(place) and condition.keys() & others:
            yield place


def _values_of(template: Template) -> dict[str, Any]:
    """What a template gives the cells of its product, by key: a value, or those of an axis."""
    axes = {key: values for group in (template.matrix, *template.zip) for key, values in group.items()}
    return template.base | axes


_PIPE = Path("piped template")
"""Stands for the file of a template that comes through a pipe; paths in it are relative to this folder."""


def conditions(template: Template) -> dict[str, dict[str, Any]]:
    """The conditions on cells in a template, by their place."""
    found = {f"exclude[{number}]": each for number, each in enumerate(template.exclude)}
    return found | {f"overrides[{number}].when": each.when for number, each in enumerate(template.overrides)}


def accepted_values(key: str, accepted: Any) -> list[Any]:
    """The values that a condition accepts for a key: one, or each of a list."""
    if not isinstance(accepted, list):
        return [accepted]
    is_one_value = key in LIST_KEYS and accepted and isinstance(accepted[0], int | float)
    return [accepted] if is_one_value else accepted


def misspelt(key: str) -> str | None:
    """The key of a template that the first part of an unknown key misspells: `matrix` for `matrx.seed`."""
    head = key.partition(".")[0]
    near = difflib.get_close_matches(head, (*OWN_KEYS, *SECTIONS, "seed"), n=1, cutoff=0.7)
    return near[0] if near and head != near[0] in OWN_KEYS else None


def _loaded(file: Path, heirs: tuple[Path, ...], text: str | None = None) -> Template:
    """The template in a file, over the one that it starts from.

    Args:
        file: of the template.
        heirs: the files that start from this one.
        text: what came through a pipe in place of the file.
    """
    if file.resolve() in heirs:
        raise UserError(f"{file}: base: the template starts from itself")
    content = read_mapping(file, holds_text=_holds_text, text=text)
    if (base := content.pop("base", None)) is None:
        return _read(content, file=file)
    try:
        start = find_template("experiments", _text(base, where="base"), beside=file.parent)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    below = _content(_loaded(start, (*heirs, file.resolve())), beside=file.parent)
    own = _read(content, file=file)
    changed = {key: value for key, value in _content(own).items() if key in content and key in OWN_KEYS}
    named = {"name": own.name, "description": own.description}
    # Its own exceptions come behind the settings that they are exceptions to.
    overrides = changed.pop("overrides", [])
    if "overrides" in content:
        below["overrides"] = []
    merged: Any = OmegaConf.to_container(OmegaConf.merge(below, changed, named))
    if "speed_steps" in content and own.speed_steps is None:
        merged.pop("speed_steps", None)
    for key, value in own.base.items():
        _set_everywhere(merged, key, value)
    merged["overrides"] += overrides
    return _read(merged, file=file)


def _read(content: dict[str, Any], *, file: Path) -> Template:
    where = str(file)
    speed_steps = content.get("speed_steps")
    if speed_steps is not None and not (type(speed_steps) is int and speed_steps >= _FEWEST_SPEED_STEPS):
        raise UserError(
            f"{where}: speed_steps must be a whole number from {_FEWEST_SPEED_STEPS} on, or null, not "
            f"{speed_steps!r}"
        )
    matrix = _axes(content.get("matrix") or {}, where=f"{where}: matrix")
    return Template(
        source=where,
        folder=file.parent,
        name=_text(content.get("name", file.stem), where=f"{where}: name"),
        description=_text(content.get("description", ""), where=f"{where}: description"),
        variables=_variables(content.get("variables") or {}, where=f"{where}: variables"),
        base=_settings({key: value for key, value in content.items() if key not in OWN_KEYS}, where=where),
        matrix=matrix,
        zip=_zips(content.get("zip") or [], matrix, where=f"{where}: zip"),
        include=_list_of(_settings, content.get("include"), where=f"{where}: include"),
        exclude=_list_of(_condition, content.get("exclude"), where=f"{where}: exclude"),
        overrides=_list_of(_override, content.get("overrides"), where=f"{where}: overrides"),
        speed_steps=speed_steps,
    )


def _text(value: Any, *, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where} must be text, not {value!r}")
    return value


def _variables(content: Any, *, where: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise UserError(f"{where} must map names to values, not {content!r}")
    for name, value in content.items():
        if not name.isidentifier() or isinstance(value, Mapping):
            raise UserError(
                f"{where}.{name}: accepted: a name of letters, digits and _, with one value or a list"
            )
    return content


def _list_of(read: Any, entries: Any, *, where: str) -> list[Any]:
    if entries is None:
        return []
    if not isinstance(entries, list):
        raise UserError(f"{where} must be a list")
    return [read(entry, where=f"{where}[{index}]") for index, entry in enumerate(entries)]


def _settings(content: Any, *, where: str) -> Settings:
    if not isinstance(content, Mapping):
        raise UserError(f"{where} must map keys to values, not {content!r}")
    content = dict(content)
    model = content.get("model")
    is_shape = isinstance(model, dict) and ("base" in model or model.keys() >= MODEL_SHAPE)
    if is_shape:
        del content["model"]
    with refused_at(f"{where}: "):
        flat = flatten(content)
    settings: Settings = {}
    for key, value in (flat | ({"model": model} if is_shape else {})).items():
        if canonical(key) in settings:
            raise UserError(f"{where}: {key} is given twice")
        settings[canonical(key)] = value
    return settings


def _condition(content: Any, *, where: str) -> dict[str, Any]:
    if not content:
        raise UserError(f"{where} names no key, so it would match every cell")
    condition = _settings(content, where=where)
    if isinstance(condition.get("model"), Mapping):
        raise UserError(f"{where}: model: takes a name, or a list of names, in a condition")
    return condition


def _axes(content: Any, *, where: str) -> dict[str, list[Any]]:
    axes = _settings(content, where=where)
    for key, values in axes.items():
        if not isinstance(values, list):
            axes[key] = values = [values]
        if not values:
            raise UserError(f"{where}: {key} has no values")
    return axes


def _zips(content: Any, matrix: Iterable[str], *, where: str) -> list[dict[str, list[Any]]]:
    """The groups of axes that vary together; none is an axis of the matrix, too, or of another group."""
    groups = [content] if isinstance(content, Mapping) else content
    if not isinstance(groups, list):
        raise UserError(f"{where} must map axes to lists of equal length, or be a list of such groups")
    zips = [_axes(group, where=where) for group in groups]
    seen = set(matrix)
    for group in zips:
        if len({len(values) for values in group.values()}) > 1:
            lengths = ", ".join(f"{key} {len(values)}" for key, values in group.items())
            raise UserError(f"{where}: axes that vary together need equally many values ({lengths})")
        if duplicates := sorted(seen & group.keys()):
            raise UserError(f"{where}: {duplicates[0]} is an axis already, in matrix or another zip")
        seen |= group.keys()
    return [group for group in zips if group]


def _override(content: Any, *, where: str) -> Override:
    if not isinstance(content, Mapping) or not content.keys() <= {"when", "set"} or "set" not in content:
        raise UserError(f"{where} must have `set` and may have `when`, nothing else")
    when = _condition(content["when"], where=f"{where}.when") if content.get("when") else {}
    return Override(when=when, set=_settings(content["set"], where=f"{where}.set"))


def _changed(template: Template, change: str) -> Template:
    """The template after a change: KEY=VALUE, +KEY=VALUE (the same) or ~KEY, which removes."""
    content = _content(template)
    if change.startswith("~") and "=" in change:
        raise UserError(f"{change}: to remove a setting write {change.partition('=')[0]}, without a value")
    if change.startswith("~"):
        _remove(content, change.removeprefix("~"))
        return _read(content, file=Path(template.source))
    key, equals, text = change.lstrip("+").partition("=")
    if not equals or not key:
        raise UserError(
            f"{change!r} is not KEY=VALUE, as in train.steps=300 or 'matrix.seed=[0,1]', nor ~KEY (to remove)"
        )
    value = parse_setting(key, text)
    if (
        isinstance(value, str)
        and "," in value
        and "${" not in value
        and not _holds_text(tuple(key.split(".")))
    ):
        raise UserError(f"{change}: several values are an axis: 'matrix.{key}=[{text}]'")
    section, _, rest = key.partition(".")
    if key == "base":
        raise UserError(f"{change}: set base in a template's file")
    if key in OWN_KEYS:
        content[key] = value
    elif section in ("matrix", "variables"):
        content[section][canonical(rest)] = value
    elif section in OWN_KEYS:
        raise UserError(f"{change}: set {section} as a whole ({section}=...)")
    elif near := misspelt(key):
        raise UserError(f"{change}: unknown key; did you mean {near}{key.removeprefix(section)}?")
    else:
        _set_everywhere(content, canonical(key), value)
    return _read(content, file=Path(template.source))


def _remove(content: dict[str, Any], given: str) -> None:
    """Remove a key of the template, or a setting wherever the template sets it."""
    section, _, rest = given.partition(".")
    if section in ("matrix", "variables") and rest:
        places, key = [content[section]], canonical(rest)
    elif section in OWN_KEYS:
        places, key = [content], given
    else:
        cases = (case["set"] for case in content["overrides"])
        places, key = [content, content["matrix"], *content["include"], *cases], canonical(given)
    found = [place for place in places if key in place]
    for place in found:
        del place[key]
    if not found:
        near = difflib.get_close_matches(given, [each for place in places for each in place], n=1)
        meant = f"; did you mean ~{near[0]}?" if near else ""
        raise UserError(f"~{given}: this template does not set {given}{meant}")


def _set_everywhere(content: dict[str, Any], key: str, value: Any) -> None:
    """Set a key for all cells, over whatever the template sets for some of them."""
    if isinstance(value, list) and key not in LIST_KEYS:
        raise UserError(f"{key} takes one value; for an axis write 'matrix.{key}=[...]'")
    if any(key in group for group in content["zip"]):
        raise UserError(f"{key} is an axis of zip in this template: set zip as a whole (zip=...)")
    if isinstance(value, Mapping) and key != "model":
        raise UserError(f"{key} is a section; accepted: one of its keys at a time, as in {key}.KEY=VALUE")
    section, _, name = key.partition(".")
    if section == "model" and name and isinstance(content.get("model"), dict):
        content["model"][name] = value
    else:
        content[key] = value
    if key in content["matrix"]:
        content["matrix"][key] = [value]
    settings_of_some_cells = [
        content["matrix"],
        *content["zip"],
        *content["include"],
        *(override["set"] for override in content["overrides"]),
    ]
    if any(key in settings or section in settings for settings in settings_of_some_cells):
        content["overrides"].append({"set": {key: value}})


def _content(template: Template, *, beside: Path | None = None) -> dict[str, Any]:
    """The template as the mapping that a template file holds.

    Args:
        template: to write.
        beside: the folder of the file; None: the template's own.
    """
    content = {key: value for key, value in asdict(template).items() if key not in _NO_KEYS}
    if beside is not None and beside != template.folder:
        for settings in (content["base"], content["matrix"], *content["include"]):
            if "model" in settings:
                settings["model"] = _moved(settings["model"], template.folder)
    if template.speed_steps is None:
        del content["speed_steps"]
    content |= content.pop("base")
    content["overrides"] = [
        {"when": override["when"], "set": override["set"]} if override["when"] else {"set": override["set"]}
        for override in content["overrides"]
    ]
    return content


def _moved(model: Any, folder: Path) -> Any:
    """A model, a list of models or a model's shape, with paths relative to a folder made absolute."""
    if isinstance(model, list):
        return [_moved(each, folder) for each in model]
    if isinstance(model, dict):
        return model | {"base": _moved(model["base"], folder)} if "base" in model else model
    return str((folder / model).absolute()) if (folder / str(model)).is_file() else model


def text_of(template: Template) -> str:
    """The template as YAML; reading it gives the same cells."""
    content = {key: value for key, value in _content(template).items() if value not in ("", [], {})}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
