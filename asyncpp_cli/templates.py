"""Templates: those that are shipped, by name, and the user's own, by file."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from asyncpp_cli.errors import UserError
from asyncpp_cli.settings import SECTIONS, SettingError, flatten, typed
from asyncpp_cli.yaml_files import read_mapping

SHIPPED = Path(__file__).parents[1] / "templates"
"""Installed beside this package."""

KINDS = {"experiments": "experiment", "models": "model", "sites": "site"}
"""Folder of each kind of template, and what one is called."""


def names(folder: str) -> list[str]:
    """The names of the shipped templates of a kind, sorted.

    Args:
        folder: a key of `KINDS`.
    """
    return sorted(file.stem for file in (SHIPPED / folder).glob("*.yaml"))


def find(folder: str, name: str, *, beside: Path | None) -> Path:
    """The file of a template.

    Args:
        folder: a key of `KINDS`.
        name: of a shipped template, or the path of a file.
        beside: a folder that a relative path may also start from.

    Raises:
        UserError: there is no such template; the shipped ones are named.
    """
    if name in names(folder):
        return SHIPPED / folder / f"{name}.yaml"
    for start in (beside, Path()):
        if start is not None and (start / name).is_file():
            return start / name
    accepted = ", ".join(names(folder))
    raise UserError(
        f"unknown {KINDS[folder]} template {name!r}; accepted: {accepted}, or the path of a YAML file"
    )


@functools.cache
def model_settings(name: str, beside: Path | None) -> dict[str, Any]:
    """The settings `model.*` of a model template.

    Raises:
        UserError: there is no such template, or it is no model.
    """
    file = find("models", name, beside=beside)
    content = {"name": file.stem} | read_mapping(file)
    content.pop(RECOMMENDED, None)
    try:
        settings = {f"model.{key}": typed(f"model.{key}", value) for key, value in content.items()}
    except SettingError as error:
        raise UserError(f"{file}: {error.key.removeprefix('model.')}: {error}") from error
    required = {f"model.{key}" for key in SECTIONS["model"] if key not in _OPTIONAL}
    if missing := sorted(required - settings.keys()):
        raise UserError(f"{file}: {missing[0].removeprefix('model.')} is not set")
    return settings


@functools.cache
def recommended_settings(name: str, beside: Path | None) -> dict[str, Any]:
    """What a model template recommends: settings of other sections, for those that an experiment leaves open.

    Raises:
        UserError: there is no such template, or it recommends what is no setting of a run.
    """
    file = find("models", name, beside=beside)
    content = read_mapping(file).get(RECOMMENDED) or {}
    if not isinstance(content, dict):
        raise UserError(f"{file}: {RECOMMENDED} must map keys to values")
    try:
        settings = {key: typed(key, value) for key, value in flatten(content).items()}
    except SettingError as error:
        raise UserError(f"{file}: {RECOMMENDED}: {error.key}: {error}") from error
    if wrong := [key for key in settings if key.partition(".")[0] not in _CAN_BE_RECOMMENDED]:
        accepted = ", ".join(_CAN_BE_RECOMMENDED)
        raise UserError(
            f"{file}: {RECOMMENDED}: {wrong[0]} is not the model's to say; accepted: keys of {accepted}"
        )
    return settings


RECOMMENDED = "recommended"
"""Section of a model template."""
_CAN_BE_RECOMMENDED = ("data", "optimizer", "schedule", "train")
_OPTIONAL = ("vocab_size", "rope_base", "norm_eps", "factory", "init", "init_sha256")
