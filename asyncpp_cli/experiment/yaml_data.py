"""Reads YAML as OmegaConf does, as plain data: no tags of Python, no repeated keys; interpolations stay text.

Where a key holds text, a value is what was written: `007` and `1.10` are not 7 and 1.1.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import omegaconf
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncpp_cli.base.errors import UserError
from stages.config.records import read_text

HoldsText = Callable[[tuple[str, ...], bool | int | float], bool]
"""Whether a place holds text, given the keys that lead there and what OmegaConf reads there."""


def _nothing(_place: tuple[str, ...], _value: object) -> bool:
    return False


_LARGEST = 4 * 2**20
_MOST_VALUES = 100_000
"""Aliases make a small file a large one."""
_HASH = "\ufffd"
"""Replaces # to read a text as if it had no comments."""


def read_mapping(file: Path, *, holds_text: HoldsText = _nothing, text: str | None = None) -> dict[str, Any]:
    """The mapping in a YAML file; all keys are text.

    Args:
        file: to read.
        holds_text: whether a place in it holds text.
        text: what came through a pipe in place of the file.

    Raises:
        UserError: the file does not exist, is not YAML, or holds more than data.
        DamagedError: it cannot be read, or is too large for a template.
    """
    try:
        text = read_text(file, most=_LARGEST) if text is None else text
    except FileNotFoundError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from error
    content = _read(text, where=str(file), holds_text=holds_text)
    if not isinstance(content, dict):
        raise UserError(f"{file} holds no mapping of keys to values")
    return content


def parse_value(text: str, *, where: str, holds_text: HoldsText = _nothing) -> Any:
    """A value of the command line, read as YAML: `[0,1]`, `2e-3`, `true`.

    Args:
        text: to read.
        where: for messages.
        holds_text: whether a place within the value holds text.

    Raises:
        UserError: the text is not YAML, or holds more than data.
    """
    if not text.strip():
        raise UserError(f"{where}: there is no value; write null if none is meant")

    def read(text: str) -> Any:
        # As the item of a list, a bare word is a value.
        return _read(f"- {text}\n", where=where, holds_text=holds_text)

    content = read(text)
    if not isinstance(content, list) or len(content) != 1:
        raise UserError(f"{where}: {text!r} is not one value")
    if "#" in text and repr(content) != repr(read(text.replace("#", _HASH))).replace(_HASH, "#"):
        raise UserError(f"{where}: in {text!r} what follows # would be a comment; put the value into quotes")
    return content[0]


class _AsWritten(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Every value but null is the text that stands in the file."""


_AsWritten.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _read(text: str, *, where: str, holds_text: HoldsText) -> Any:
    try:
        loader = _AsWritten(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return {}
            if _count(node, {}) > _MOST_VALUES:
                raise UserError(
                    f"{where}: has more than {_MOST_VALUES:,} values, counting what aliases repeat"
                )
            written = loader.construct_document(node)
        finally:
            loader.dispose()
        if not isinstance(written, dict | list):
            return written
        # 2.3 has no limit of its own.
        most = {} if omegaconf.__version__.startswith("2.3.") else {"max_yaml_expanded_nodes": _MOST_VALUES}
        content = OmegaConf.to_container(OmegaConf.load(io.StringIO(text), **most))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{where}{place}: not YAML ({problem})") from error
    # ValueError: a number of thousands of digits. LookupError: a tag without its value.
    except (OmegaConfBaseException, RecursionError, ValueError, TypeError, LookupError) as error:
        raise UserError(f"{where} is not accepted: {str(error).splitlines()[0]}") from error
    return _checked(content, written, (), where=where, holds_text=holds_text)


def _count(node: yaml.Node, known: dict[yaml.Node, float]) -> float:
    """Number of values that a node stands for; infinite, if it holds itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if node not in known:
        known[node] = math.inf
        inner = (each for pair in node.value for each in (pair if isinstance(pair, tuple) else (pair,)))
        known[node] = 1 + sum(_count(each, known) for each in inner)
    return known[node]


_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_OCTAL = re.compile(r"[-+]?0[0-7_]*[0-7]")


def _checked(value: Any, written: Any, place: tuple[str, ...], *, where: str, holds_text: HoldsText) -> Any:
    """A value with text as it was written, given as OmegaConf reads it and as it was written."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise UserError(f"{where}: the key {key!r} is not text")
        return {
            key: _checked(each, written[key], (*place, key), where=where, holds_text=holds_text)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [
            _checked(each, as_written, place, where=where, holds_text=holds_text)
            for each, as_written in zip(value, written, strict=True)
        ]
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, int | float):
        raise UserError(f"{where}: {value!r} is neither text nor a number")
    if holds_text(place, value):
        return written
    at = ": ".join([where, *([".".join(place)] if place else [])])
    if _SEXAGESIMAL.fullmatch(written):
        meaning = "minutes and seconds, so as a number of seconds"
    elif _OCTAL.fullmatch(written) and value != int(written.replace("_", "")):
        meaning = f"a number to the base eight, {value}"
    else:
        return value
    raise UserError(f"{at}: {written} would be read as {meaning}; write the number itself, or text in quotes")
