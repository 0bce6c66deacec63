"""Finds templates: shipped ones by name, others by file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.experiment.interpolation import resolved_file
from asyncpp_cli.experiment.yaml_data import read_mapping
from asyncpp_cli.runs.settings import SettingError, accepted, flatten, holds_text, refused_at, unset_keys
from stages.config.keys import unknown
from stages.config.run_config import RunConfig

TEMPLATES_FOLDER = Path(__file__).parents[2] / "templates"
"""The shipped templates, installed next to this package."""

TEMPLATE_KINDS = {"experiments": "experiment", "models": "model", "sites": "site"}
"""Folder and name of each kind of template."""


def template_names(folder: str) -> list[str]:
    """The names of the shipped templates of a kind, sorted.

    Args:
        folder: a key of `TEMPLATE_KINDS`.
    """
    return sorted(file.stem for file in (TEMPLATES_FOLDER / folder).glob("*.yaml"))


def find_template(folder: str, name: str, *, beside: Path | None) -> Path:
    """The file of a template.

    Args:
        folder: a key of `TEMPLATE_KINDS`.
        name: of a shipped template, or the path of a file.
        beside: a folder to which a path may be relative, too.

    Raises:
        UserError: there is no such template.
    """
    if name in template_names(folder):
        return TEMPLATES_FOLDER / folder / f"{name}.yaml"
    path = Path(name).expanduser()
    for start in (beside, Path()):
        if start is not None and (start / path).is_file():
            return start / path
    names = template_names(folder)
    if folder == "experiments" and name in template_names("models"):
        raise UserError(f"{name} is a model, not an experiment: asyncpp sweep quickstart model={name}")
    accepted = f"{not_found(name, names)}, or the path of a YAML file{another_size(name)}"
    raise UserError(f"{TEMPLATE_KINDS[folder]} template {accepted}")


def another_size(name: str) -> str:
    """How to describe a model of a size that no template has, such as 1.3b; empty if it is no size."""
    if not re.fullmatch(r"\d+(\.\d+)?[bm]", name.lower()):
        return ""
    return (
        f"; another size is a file of sizes: asyncpp templates show 1b > {name}.yaml, edit it, and name "
        f"{name}.yaml instead of {name}"
    )


def not_found(name: str, names: Collection[str]) -> str:
    """Why there is no template of this name, or no file; with the names that are accepted."""
    path = Path(name).expanduser()
    if "/" not in name and path.suffix not in (".yaml", ".yml"):
        return unknown(name, names)
    kind = "a folder" if path.is_dir() else "not a regular file"
    problem = f"is {kind}" if path.exists() else "does not exist"
    near = difflib.get_close_matches(name, names, n=1)
    return f"{name} {problem}; {f'did you mean {near[0]}? ' if near else ''}accepted: {', '.join(names)}"


MODEL_SHAPE = frozenset(
    key.removeprefix("model.") for key in unset_keys(RunConfig()) if key.startswith("model.")
) - {"name"}
"""Keys of a model that have no default."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of a template."""

    settings: dict[str, Any]
    """Settings of the section `model`, by dotted key. An empty name becomes that of the shape, once that is
    known."""
    recommended: dict[str, Any]
    """Settings of other sections, for a cell that does not set them."""
    name_prefix: str = ""
    """Beginning of the name that an empty one becomes."""


def model_content(file: Path) -> dict[str, Any]:
    """The content of a model's file, with its interpolations resolved.

    Raises:
        UserError: the file is not a mapping of data.
    """

    def holds(place: tuple[str, ...], _: object) -> bool:
        return holds_text(".".join(place[1:] if place[0] == RECOMMENDED else ("model", *place)))

    return resolved_file(read_mapping(file, holds_text=holds), where=str(file))


def read_model(name: str, *, beside: Path | None) -> Model:
    """A model by the name or file of its template.

    Raises:
        UserError: there is no such template, it is not a model, or it recommends a key that it may not.
    """
    file = find_template("models", name, beside=beside)
    content = {"name": file.stem} | model_content(file)
    recommended = content.pop(RECOMMENDED, None) or {}
    if not isinstance(recommended, dict):
        raise UserError(f"{file}: {RECOMMENDED} must map keys to values")
    try:
        settings = {f"model.{key}": accepted(f"model.{key}", value) for key, value in content.items()}
    except SettingError as error:
        raise UserError(f"{file}: {error.key.removeprefix('model.')}: {error}") from error
    if missing := sorted(MODEL_SHAPE - content.keys()):
        raise UserError(f"{file}: {missing[0]} is not set")
    with refused_at(f"{file}: {RECOMMENDED}: "):
        recommended = {key: accepted(key, value) for key, value in flatten(recommended).items()}
    if wrong := [key for key in recommended if key.partition(".")[0] not in _CAN_BE_RECOMMENDED]:
        raise UserError(
            f"{file}: {RECOMMENDED}: {wrong[0]} cannot be recommended; accepted: keys of "
            f"{', '.join(_CAN_BE_RECOMMENDED)}"
        )
    return Model(settings=settings, recommended=recommended)


RECOMMENDED = "recommended"
"""Section of a model template."""
_CAN_BE_RECOMMENDED = ("data", "optimizer", "schedule", "train")
