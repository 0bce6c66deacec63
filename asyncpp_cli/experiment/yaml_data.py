"""Reads YAML as plain data: no tags, aliases, interpolations or repeated keys."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from asyncpp_cli.base.errors import UserError
from stages.config.records import read_text

_LARGEST = 4 * 2**20

_HASH = "\ufffd"
"""Replaces # to parse a text as if it had no comments."""


def read_mapping(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file; all keys are text.

    Raises:
        UserError: the file does not exist, is not YAML, or holds more than data.
        DamagedError: it cannot be read, or is too large for a template.
    """
    try:
        text = read_text(file, most=_LARGEST)
    except FileNotFoundError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from error
    content = _parse(text, where=str(file))
    if not isinstance(content, dict):
        raise UserError(f"{file} holds no mapping of keys to values")
    return content


def parse_value(text: str, *, where: str) -> Any:
    """A value of the command line, read as YAML: `[0,1]`, `2e-3`, `true`.

    Raises:
        UserError: the text is not YAML, or holds more than data.
    """
    if not text.strip():
        raise UserError(f"{where}: there is no value; write null if none is meant")
    # As the item of a list, a bare word is a value.
    content = _parse(f"- {text}\n", where=where)
    if not isinstance(content, list) or len(content) != 1:
        raise UserError(f"{where}: {text!r} is not one value")
    if "#" in text and content != _without_comments(text, where=where):
        raise UserError(f"{where}: in {text!r} what follows # would be a comment; put the value into quotes")
    return content[0]


def _without_comments(text: str, *, where: str) -> Any:
    content = _parse(f"- {text.replace('#', _HASH)}\n", where=where)
    return json.loads(json.dumps(content, ensure_ascii=False).replace(_HASH, "#"))


class _Loader(yaml.SafeLoader):
    """Builds plain data. Unlike PyYAML's own loader it reads 2e-3 as a number and dates as text, and refuses
    repeated keys."""

    where = ""
    """What is read, for messages."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        where = f"{self.where}, line {event.start_mark.line + 1}"
        if (tag := getattr(event, "tag", None)) is not None:
            raise UserError(f"{where}: the tag {tag} is not accepted; this is data only")
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0]:
            _refuse_odd_number(event.value, where=where)
        if isinstance(event, yaml.AliasEvent):
            raise UserError(f"{where}: aliases (*{event.anchor}) are not accepted")
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        known = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in known:
                problem = f"found duplicate key {key.value}"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
            known.add(key.value)
        return node


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))([eE][-+]?\d+)?$|[-+]?\.(inf|Inf|INF)$"
        r"|\.(nan|NaN|NAN)$",
        re.ASCII,
    ),
    list("-+.0123456789"),
)


def _parse(text: str, *, where: str) -> Any:
    try:
        loader = _Loader(text)
        loader.where = where
        content = loader.get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark is not None else ""
        raise UserError(f"{where}{place}: not YAML ({getattr(error, 'problem', None) or error})") from error
    # ValueError: a number of thousands of digits.
    except (RecursionError, ValueError) as error:
        raise UserError(f"{where} is not accepted: {error}") from error
    _check(content, where=where)
    return {} if content is None else content


def _refuse_odd_number(text: str, *, where: str) -> None:
    """Refuse text that YAML 1.1 reads as an unexpected number: 1:30 as 90, 017 as 15.

    Raises:
        UserError: the text is such a number.
    """
    if _SEXAGESIMAL.fullmatch(text):
        meaning = "minutes and seconds, so as a number of seconds"
    elif _OCTAL.fullmatch(text) and int(digits := text.replace("_", ""), 8) != int(digits):
        meaning = f"a number to the base eight, {int(digits, 8)}"
    else:
        return
    raise UserError(f"{where}: {text} would be read as {meaning}; write the number itself, or text in quotes")


_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_OCTAL = re.compile(r"[-+]?0[0-7_]*[0-7]")


def _check(content: Any, *, where: str) -> None:
    if isinstance(content, Mapping):
        for key, value in content.items():
            if not isinstance(key, str):
                raise UserError(f"{where}: the key {key!r} is not text")
            _check(value, where=where)
    elif isinstance(content, list):
        for value in content:
            _check(value, where=where)
    elif isinstance(content, str) and "${" in content:
        raise UserError(f"{where}: {content!r} asks for an interpolation; write the value itself")
    elif not isinstance(content, str | int | float | bool | None):
        raise UserError(f"{where}: {content!r} is neither text nor a number")
