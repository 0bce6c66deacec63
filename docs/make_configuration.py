"""Writes docs/configuration.md, the reference of all configuration keys, from stages/config.py:

python docs/make_configuration.py
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path

import yaml
from omegaconf import MISSING

from stages.config import RunConfig

FILE = Path(__file__).with_name("configuration.md")

HEAD = """\
# Configuration keys

Every setting of a run, as it stands in a run's `config.yaml` and may stand in a template or behind
`asyncpp sweep` (`train.steps=1000`). [templates.md](templates.md) says how to write them, `asyncpp optimizers
show NAME` and `asyncpp schedule list` which of them an optimizer or a schedule takes.

A key without a default must be given; a size's template (`model: nano`) gives all of `model`. `site` holds
what may differ from machine to machine without making it another run. This page is made from
`stages/config.py` by `make docs`.
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
    lines = [("key", "type", "default", "meaning"), ("---",) * 4, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _rows(section: type, *, prefix: str, only: list[str] | None = None) -> Iterator[tuple[str, ...]]:
    meanings, types = _meanings(section), _types(section)
    for entry in dataclasses.fields(section):
        if only is None or entry.name in only:
            yield (
                f"`{prefix}{entry.name}`",
                types[entry.name].replace("|", "or").replace("None", "null"),
                _default(entry.default),
                meanings.get(entry.name, "").replace("|", r"\|"),
            )


def _default(value: object) -> str:
    if value == MISSING:
        return ""
    return str(yaml.safe_dump(value)).partition("\n")[0]


def _class(section: type) -> ast.ClassDef:
    tree = ast.parse(inspect.getsource(section))
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
