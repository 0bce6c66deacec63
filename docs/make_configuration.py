"""Generates docs/configuration.md, the reference of all configuration keys, from stages/config.py:

python docs/make_configuration.py
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path

import yaml
from omegaconf import MISSING

from optimizers import CORRECTIONS, METHODS, CorrectionMethod, Method
from schedules import OPTIONS
from stages.config import CORRECTION_NAMES, RunConfig
from stages.config_keys import KeyFacts, facts

DECLARED: dict[str, list[Method] | list[CorrectionMethod]] = {
    "optimizer": list(METHODS.values()),
    "correction": [CORRECTIONS[name] for name in CORRECTION_NAMES],
}
"""The methods whose options are keys of a section."""

FILE = Path(__file__).with_name("configuration.md")

HEAD = """\
# Configuration keys

All settings of a run, by key. They are the content of a run's `config.yaml`, and can be set in a template
or on the command line (`asyncpp sweep mine.yaml train.steps=1000`). See [templates.md](templates.md) for
how to write them. `asyncpp optimizers show NAME` and `asyncpp schedule list` show which options an
optimizer or a schedule takes.

A key without a default is required; a model size (`model: nano`) sets all of `model`. Settings in `site`
may differ from machine to machine. All others are part of the run's id, except the paths of data and of
`model.init`, which count by their content. `null` means unset.

This page is generated from `stages/config.py` by `make docs`.
"""


def text() -> str:
    """The page."""
    parts = [HEAD]
    hints = typing.get_type_hints(RunConfig)
    alone = []
    for entry in dataclasses.fields(RunConfig):
        if dataclasses.is_dataclass(hints[entry.name]):
            parts.append(_section(entry.name, hints[entry.name]))
        else:
            alone.append(entry.name)
    parts.append("## Others\n\n" + _table(_rows(RunConfig, prefix="", only=alone)))
    return "\n".join(parts)


def _section(name: str, section: type) -> str:
    return f"## {name}\n\n" + _table(_rows(section, prefix=f"{name}."))


def _table(rows: Iterator[tuple[str, ...]]) -> str:
    lines = [("key", "accepted", "default", "meaning"), ("---",) * 4, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _rows(section: type, *, prefix: str, only: list[str] | None = None) -> Iterator[tuple[str, ...]]:
    meanings, types = _meanings(section), _types(section)
    meanings |= _declared(prefix.rstrip("."))
    for entry in dataclasses.fields(section):
        if only is None or entry.name in only:
            yield (
                f"`{prefix}{entry.name}`",
                _accepted(types.get(entry.name, _type_name(entry.type)), facts(entry)),
                "{}" if entry.default is dataclasses.MISSING else _default(entry.default),
                meanings.get(entry.name, "").replace("|", r"\|"),
            )


def _type_name(of: object) -> str:
    return of.__name__ if isinstance(of, type) and not typing.get_args(of) else str(of)


def _accepted(annotation: str, declared: KeyFacts) -> str:
    """A key's type, and its bounds or choices."""
    accepted = [annotation.replace("|", "or").replace("None", "null")]
    accepted += [declared.bounds()] if declared.bounds() else []
    accepted += [" or ".join(f"`{choice}`" for choice in declared.choices)] if declared.choices else []
    return ", ".join(accepted)


def _default(value: object) -> str:
    if value == MISSING:
        return ""
    return str(yaml.safe_dump(value)).partition("\n")[0]


def _declared(section: str) -> dict[str, str]:
    """Meanings of a section's options: of methods with their owners and default, of schedules as declared."""
    if section == "schedule":
        return {name: option.meaning for name, option in OPTIONS.items()}
    methods = DECLARED.get(section, [])
    meanings = {}
    for name in dict.fromkeys(name for method in methods for name in method.options):
        options = {method.name: method.options[name] for method in methods if name in method.options}
        owners: dict[str, list[str]] = {}
        for owner, option in options.items():
            choices = f" ({', '.join(f'`{choice}`' for choice in option.choices)})" if option.choices else ""
            owners.setdefault(option.meaning + choices, []).append(owner)
        defaults = {_default(option.default) for option in options.values()}
        default = defaults.pop() if len(defaults) == 1 else "the optimizer's default"
        said = "; ".join(f"{', '.join(names)}: {meaning}" for meaning, names in owners.items())
        meanings[name] = f"{said}; null: {default}."
    return meanings


def _class(section: type) -> ast.ClassDef:
    if section.__mro__[1].__name__ == section.__name__:
        section = section.__mro__[1]  # the class as it is written, without the options
    tree = ast.parse(textwrap.dedent(inspect.getsource(section)))
    [found] = tree.body
    assert isinstance(found, ast.ClassDef)
    return found


def _types(section: type) -> dict[str, str]:
    return {
        node.target.id: ast.unparse(node.annotation)
        for node in _class(section).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _meanings(section: type) -> dict[str, str]:
    """The string under each field, on one line."""
    meanings, field = {}, None
    for node in _class(section).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            field = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and field is not None:
            meanings[field] = " ".join(str(node.value.value).split())
    return meanings


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
