"""Generates docs/configuration.md, the reference of all keys of a run's configuration and of site profiles:

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

from asyncpp_cli.sites.profile import Site
from stages.config.keys import LARGEST, MISSING, KeyFacts, facts
from stages.config.run_config import RunConfig

FILE = Path(__file__).with_name("configuration.md")

HEAD = """\
# Configuration keys

    asyncpp sweep mine.yaml train.steps=1000 --list

Every key below can be set in a [template](templates.md) or on the command line, and stands in a run's
`config.yaml`. A key without a default is required; a model size (`model: nano`) sets all of `model`. `null`
means unset. Bounds that no real run reaches are left out; the message that refuses a value names them.

Keys of `site` may differ from machine to machine. All others are part of the run's id; of data and
`model.init` their content counts, not their path. `sweep` writes the hashes (`..sha256`), and a run refuses
other content.

This page is generated: `make docs`.
"""


SITES = """\
## Site profiles

The keys of a file `NAME.yaml` for `--site NAME` ([slurm.md](slurm.md#a-site-profile)). They are not part of
a run's id.
"""


OPTIONS = """
`asyncpp optimizers show NAME` has the meaning and default of the {section}'s own options, which are null
here: {names}.
"""


def text() -> str:
    """The page."""
    parts = [HEAD]
    hints = typing.get_type_hints(RunConfig)
    alone = []
    for entry in dataclasses.fields(RunConfig):
        if dataclasses.is_dataclass(hints[entry.name]):
            parts.append(_section(entry.name, hints[entry.name]))
        elif entry.name != "gone":
            alone.append(entry.name)
    parts.append("## Others\n\n" + _table(_rows(RunConfig, prefix="", only=alone)))
    parts += [SITES, _profile_table()]
    return "\n".join(parts)


def _profile_table() -> str:
    """The keys of a site profile, which says itself what it accepts."""
    meanings = _meanings(Site)
    lines = [("key", "default", "meaning"), ("---",) * 3]
    for entry in dataclasses.fields(Site):
        if entry.name not in ("name", "file"):
            meaning = meanings.get(entry.name, "").replace("|", r"\|")
            lines.append((f"`{entry.name}`", _profile_default(entry), meaning))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _profile_default(entry: dataclasses.Field[object]) -> str:
    if entry.default_factory is not dataclasses.MISSING:
        return _default(entry.default_factory())
    return "" if entry.default is dataclasses.MISSING else _default(entry.default)


def _section(name: str, section: type) -> str:
    part = f"## {name}\n\n" + _table(_rows(section, prefix=f"{name}."))
    own = ", ".join(f"`{entry.name}`" for entry in dataclasses.fields(section) if facts(entry).option)
    return part + (OPTIONS.format(section=name, names=own) if own else "")


def _table(rows: Iterator[tuple[str, ...]]) -> str:
    lines = [("key", "default", "meaning"), ("---",) * 3, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _rows(section: type, *, prefix: str, only: list[str] | None = None) -> Iterator[tuple[str, ...]]:
    meanings, types = _meanings(section), _types(section)
    for entry in dataclasses.fields(section):
        if not facts(entry).option and (only is None or entry.name in only):
            meaning = meanings.get(entry.name, "").replace("|", r"\|")
            default = {} if entry.default is dataclasses.MISSING else entry.default
            accepted = _accepted(facts(entry), meaning=meaning)
            if default is None or default == MISSING:
                accepted.insert(0, _type_name(types.get(entry.name, entry.type)))
            said = _default(default) or "required"
            said += f" ({', '.join(accepted)})" if accepted else ""
            yield f"`{prefix}{entry.name}`", said, meaning


def _type_name(of: object) -> str:
    name = of.__name__ if isinstance(of, type) and not typing.get_args(of) else str(of)
    return name.removesuffix(" | None").replace("tuple[", "list[").replace(", ...]", "]")


def _accepted(declared: KeyFacts, *, meaning: str) -> list[str]:
    """The bounds of a share, and the choices that a key's meaning does not name."""
    accepted = []
    if declared.high <= 1 or declared.below is not None:
        bounds = {"≥": declared.low, ">": declared.above, "<": declared.below, "≤": declared.high}
        accepted += [f"{sign} {bound:g}" for sign, bound in bounds.items() if bound not in (None, LARGEST)]
    choices = [] if ":" in declared.also else [f"`{choice}`" for choice in declared.choices]
    return accepted + ([] if all(choice in meaning for choice in choices) else [" or ".join(choices)])


def _default(value: object) -> str:
    if value == MISSING:
        return ""
    return str(yaml.safe_dump(value)).partition("\n")[0]


def _class(section: type) -> ast.ClassDef:
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
