"""Conversion of dataclasses to JSON and back, so that processes exchange data and no pickles."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from stages.comm.rendezvous.authenticated import Json

T = TypeVar("T")


def to_json(value: object) -> Json:
    """JSON for a value of dataclasses, named tuples, sequences, mappings, string enums and JSON's own
    types."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list | deque):
        return [to_json(part) for part in value]
    if isinstance(value, Mapping):
        # As pairs, since keys may be numbers, which JSON objects do not allow.
        return [[to_json(key), to_json(part)] for key, part in value.items()]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} is not data")


def from_json(kind: type[T], content: Json) -> T:
    """The value of type `kind` that `to_json` converted.

    Raises:
        TypeError: `content` does not fit the type.
    """
    return cast(T, _parse(kind, content))


def _parse(kind: Any, content: Json) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _parse_union(arguments, content)
    if kind is float and type(content) is int:
        return float(content)
    if kind in (bool, int, float, str, NoneType):
        return _checked(kind, content)
    if origin in (dict, list, deque, tuple):
        parts = _checked(list, content)
        if origin is dict:
            return {_parse(arguments[0], key): _parse(arguments[1], part) for key, part in parts}
        if origin is not tuple:
            return origin(_parse(arguments[0], part) for part in parts)
        return tuple(_parse(of, part) for of, part in zip(arguments, parts, strict=True))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(content)
    hints = _hints(kind)
    if isinstance(kind, type) and issubclass(kind, tuple):
        return kind(*(_parse(of, part) for of, part in zip(hints.values(), content, strict=True)))
    given = _checked(dict, content)
    if not is_dataclass(kind) or given.keys() != {field.name for field in fields(kind)}:
        raise TypeError(f"{sorted(given)[:5]} is no {kind}")
    make: Any = kind
    return make(**{name: _parse(hints[name], part) for name, part in given.items()})


def _parse_union(kinds: tuple[Any, ...], content: Json) -> Any:
    for kind in kinds:
        if (kind is NoneType) == (content is None):
            return _parse(kind, content)
    raise TypeError(f"{content!r} is none of {kinds}")


def _checked(kind: type, content: Json) -> Any:
    if type(content) is not kind:
        raise TypeError(f"{content!r} is no {kind.__name__}")
    return content


@lru_cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
