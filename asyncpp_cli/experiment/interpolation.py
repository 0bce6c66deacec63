"""Resolves the interpolations in a cell's settings, by OmegaConf: `${optimizer.lr}`, `${oc.env:SCRATCH}`.

Only the resolvers of `RESOLVERS` are accepted; none of them runs code.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import omegaconf
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncpp_cli.runs.settings import DEFAULTS, SECTIONS, SettingError, accepted, check_key, refused_at


def _mul(*factors: Any) -> Any:  # OmegaConf would check another type
    return _plain(math.prod(map(_number, factors), start=Fraction(1)))


def _div(*numbers: Any) -> Any:
    if len(numbers) != 2:
        raise TypeError("div takes two numbers")
    dividend, divisor = map(_number, numbers)
    if not divisor:
        raise ZeroDivisionError("division by zero")
    return _plain(dividend / divisor)


def _number(value: Any) -> Fraction:
    """A number as it is written: 0.1 is a tenth."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{value!r} is not a number")
    return Fraction(str(value))


def _plain(number: Fraction) -> float:
    """An integer where the number is one, so that a key of integers accepts it."""
    return number.numerator if number.denominator == 1 else float(number)


_ARITHMETIC: Mapping[str, Callable[..., Any]] = {"mul": _mul, "div": _div}
RESOLVERS = ("oc.env", "oc.decode", "oc.select", *_ARITHMETIC)
"""What may stand before the colon in `${NAME:...}`."""

_RESOLVER = re.compile(r"\$\{\s*([^\s${}:]+)\s*:")
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_][A-Za-z0-9_]*)")
_WORD = re.compile(r"[A-Za-z_]\w*")


def is_interpolated(value: Any) -> bool:
    """Whether a value, or one within it, is to be resolved."""
    if isinstance(value, str):
        return "${" in value
    return isinstance(value, list | Mapping) and any("${" in text for text in _texts(value))


def environment_of(value: Any) -> dict[str, None]:
    """The environment variables that a value of a template reads, anywhere in it."""
    return {name: None for text in _texts(value) for name in _ENVIRONMENT.findall(text)}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def interpolated(settings: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
    """A cell's settings with the values of those that are interpolated.

    Args:
        settings: by dotted key; others have their defaults.
        variables: of the template.

    Raises:
        SettingError: a value refers to what is unknown or not set, or to itself; or its key does not accept
            it.
    """
    pending = {key: value for key, value in settings.items() if is_interpolated(value)}
    if not pending:
        return dict(settings)
    words = {word for value in (pending, variables) for text in _texts(value) for word in _WORD.findall(text)}
    tree: dict[str, Any] = {"variables": dict(variables)}
    for key, value in {**DEFAULTS, **settings}.items():
        *sections, name = key.split(".")
        if key in pending or name in words:
            place = tree
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
    try:
        container = OmegaConf.create(tree)
    except OmegaConfBaseException as error:
        raise SettingError(next(iter(pending)), _first_line(error)) from error
    found = {key: accepted(key, _value(container, key, value)) for key, value in pending.items()}
    return {**settings, **found}


def resolved_file(content: dict[str, Any], *, where: str) -> dict[str, Any]:
    """The content of a file with its interpolations resolved; they refer to its own keys.

    Raises:
        UserError: one of them cannot be resolved.
    """
    if not is_interpolated(content):
        return content
    container = OmegaConf.create(content)
    with refused_at(f"{where}: "):
        return {
            key: _value(container, key, value) if is_interpolated(value) else value
            for key, value in content.items()
        }


def _value(container: Any, key: str, text: Any) -> Any:
    for name in (name for each in _texts(text) for name in _RESOLVER.findall(each)):
        if name not in RESOLVERS:
            raise SettingError(key, f"{name!r} is no resolver; accepted: {', '.join(RESOLVERS)}")
    for name in environment_of(text):
        if name not in os.environ and f"oc.env:{name}," not in str(text).replace(" ", ""):
            raise SettingError(key, f"the environment variable {name} is not set")
    try:
        value = OmegaConf.select(container, key, throw_on_missing=True)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
    except (OmegaConfBaseException, RecursionError, ValueError, TypeError, ArithmeticError) as error:
        raise SettingError(key, f"{_shown(text)}: {_explained(error, container)}") from error
    if isinstance(value, Mapping) and isinstance(text, str):
        raise SettingError(key, f"{_shown(text)} is a section; name one of its keys: {', '.join(value)}")
    return value


def _shown(text: Any) -> str:
    return text if isinstance(text, str) else json.dumps(text)


def _explained(error: Exception, container: Any) -> str:
    """What is wrong, from OmegaConf's words."""
    message = _first_line(error)
    if isinstance(error, RecursionError) or "recursi" in message.lower():
        return "refers to itself"
    if (unset := re.search(r"[Mm]issing mandatory value: (\S+)", message)) is not None:
        return f"{unset[1]} is not set"
    if (key := re.search(r"[Ii]nterpolation key '(.+?)' not found", message)) is None:
        return re.sub(r"^\w+ raised while resolving interpolation: ", "", message)
    if "variables" not in container:
        return f"{key[1]} is not set; in this file: {', '.join(container)}"
    if key[1] in SECTIONS:
        return f"{key[1]} is a section; name one of its keys"
    if key[1].startswith("variables."):
        return f"{key[1]} is not set; in variables: {', '.join(container.variables) or 'nothing'}"
    try:
        check_key(key[1])
    except SettingError as unknown:
        return f"{key[1]}: {unknown}"
    return f"{key[1]} is not set"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# 2.4 has a new name for it and warns of the old; in 2.3 the new name is that of an older function.
_is_old = omegaconf.__version__.startswith("2.3.")
_register = OmegaConf.register_new_resolver if _is_old else OmegaConf.register_resolver
for _name, _resolver in _ARITHMETIC.items():
    _register(_name, _resolver, replace=True)
