"""Run configurations by dotted key: accepted keys, types of values, access, and the hash of a run.

The types are those of `stages.config.run_config`; msgspec converts values to them.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import json
import math
import operator
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from asyncpp_cli.base.errors import UserError
from stages.config.keys import MISSING
from stages.config.limits import KEY_FACTS
from stages.config.run_config import RunConfig, changed


class SettingError(Exception):
    """A key or a value that a run configuration does not accept. `key` is dotted."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


@contextmanager
def refused_at(where: str) -> Iterator[None]:
    """Refuse what a `SettingError` says in this block as a mistake of the user, after `where`."""
    try:
        yield
    except SettingError as error:
        raise UserError(f"{where}{error.key}: {error}") from error


SECTIONS: dict[str, tuple[str, ...]] = {
    name: tuple(field.name for field in dataclasses.fields(section))
    for name, section in vars(RunConfig()).items()
    if dataclasses.is_dataclass(section)
}
"""The keys of each section."""

OPEN_KEYS: Mapping[str, tuple[str, Any]] = {
    "optimizer.options": ("option", bool | int | float | str | None),
    "data.sources": ("source", str | None),
    "data.weights": ("weight", float | None),
    "data.validation": ("set", str | None),
    "data.validation_sha256": ("hash", str | None),
}
"""Keys of mappings, what these hold, and its type: any name may follow, as in `optimizer.options.beta`."""

KEYS: tuple[str, ...] = tuple(key for key in KEY_FACTS if key not in OPEN_KEYS)
"""Dotted keys of a run configuration, in order, without `OPEN_KEYS`."""

_KINDS: Mapping[str, Any] = {
    f"{name}.{key}": hint
    for name in SECTIONS
    for key, hint in typing.get_type_hints(type(getattr(RunConfig(), name))).items()
} | {"seed": int}
"""The type of the values of each key of `KEYS`."""

LIST_KEYS: tuple[str, ...] = tuple(
    key
    for key, kind in _KINDS.items()
    if any(typing.get_origin(each) is tuple for each in typing.get_args(kind))
)
"""Keys whose value is a list."""

SITE = "site"
"""The section that is not part of a run's identity."""


_SITE_KEYS = tuple(key for key in KEYS if key.startswith(f"{SITE}."))


def check_key(key: str) -> None:
    """Check that a run configuration has this key.

    Raises:
        SettingError: it has not; the message gives the nearest accepted key, or all keys of the section.
    """
    if key in KEYS or _is_open(key):
        return
    for known, (held, _) in OPEN_KEYS.items():
        if key == known or key.startswith(f"{known}."):
            raise SettingError(key, f"takes one {held} by name: {known}.NAME")
    section = key.partition(".")[0]
    if nearest := _nearest(key):
        raise SettingError(key, f"unknown key; did you mean {nearest}?")
    accepted = [known for known in KEYS if known.startswith(f"{section}.")] or [*SECTIONS, "seed"]
    raise SettingError(key, f"unknown key; accepted: {', '.join(accepted)}")


def _is_open(key: str) -> bool:
    """Whether a key is that of an entry of one of `OPEN_KEYS`."""
    mapping, _, name = key.rpartition(".")
    return mapping in OPEN_KEYS and name.isidentifier()


def _nearest(key: str) -> str | None:
    """The accepted key that `key` probably misspells, if any.

    Names are compared without their section: the shared prefix would make any two of them similar.
    """
    section, _, name = key.rpartition(".")
    if section in SECTIONS:
        names = {known.partition(".")[2]: known for known in KEYS if known.startswith(f"{section}.")}
        if matches := difflib.get_close_matches(name, names, n=1, cutoff=_SIMILARITY):
            return names[matches[0]]
    elif matches := difflib.get_close_matches(section or name, [*SECTIONS, "seed"], n=1, cutoff=_SIMILARITY):
        corrected = f"{matches[0]}.{name}" if section else matches[0]
        return corrected if corrected in KEYS or corrected in SECTIONS else matches[0]
    same_name = [known for known in KEYS if known.rpartition(".")[2] == name]
    return same_name[0] if len(same_name) == 1 else None


_SIMILARITY = 0.7
"""Least difflib ratio of a suggestion: `stepz` and `steps` have 0.8, `tied` and `width` 0.44."""


def typed(key: str, value: Any) -> Any:
    """Convert a value to its key's type (an integer becomes a float where the key holds floats).

    Raises:
        SettingError: the key is unknown, or does not accept the value.
    """
    check_key(key)
    kind = _kind(key)
    value = _SPELLINGS.get((key, value), value) if isinstance(value, str) else value
    # An integer of more than 64 bits is none of a file's, and a float may not hold it.
    numbers = value if isinstance(value, list | tuple) else [value]
    for each in numbers:
        if isinstance(each, int) and abs(each) >= 2**63:
            kinds = _kind_name(kind)
            raise SettingError(key, f"must be {kinds}, and an integer fits into 64 bits with its sign")
        if isinstance(each, float) and not math.isfinite(each):
            raise SettingError(key, f"must be a finite number, not {value}")
    try:
        converted = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        converted = MISSING
    if converted in (MISSING, ()) or (converted == "" and key.startswith("data.")):
        if value == MISSING:
            raise SettingError(key, f'must be {_kind_name(kind)}, and "{MISSING}" stands for no value')
        hint = ""
        if isinstance(value, int | float) and holds_text(key):
            hint = "; write text that looks like a number in quotes"
        raise SettingError(key, f"must be {_kind_name(kind)}, not {json.dumps(value, default=str)}{hint}")
    if isinstance(converted, tuple):
        # 3.0 is 3, so that the two have one identity.
        return tuple(
            int(each) if isinstance(each, float) and each.is_integer() else each for each in converted
        )
    # -0.0 is 0.0, likewise.
    return converted + 0.0 if isinstance(converted, float) else converted


def accepted(key: str, value: Any) -> Any:
    """Convert a value to its key's type, and check it against the key's bounds and choices.

    Raises:
        SettingError: the key is unknown, or does not accept the value.
    """
    converted = typed(key, value)
    if key in KEY_FACTS and (reason := KEY_FACTS[key].refusal(converted)) is not None:
        raise SettingError(key, reason)
    return converted


_SPELLINGS = {
    ("train.precision", "bf16"): "bfloat16",
    ("train.precision", "fp32"): "float32",
    ("train.precision", "fp64"): "float64",
}
"""Other spellings of values."""


def holds_text(key: str) -> bool:
    """Whether a key's values are text, so that what looks like a number is none."""
    try:
        check_key(key)
    except SettingError:
        return False
    kinds = typing.get_args(_kind(key)) or (_kind(key),)
    return str in kinds and float not in kinds


def _kind(key: str) -> Any:
    """The type of a key's values."""
    section = key.rpartition(".")[0]
    return OPEN_KEYS[section][1] if section in OPEN_KEYS else _KINDS[key]


def _kind_name(kind: Any) -> str:
    """A type, as messages name it."""
    # A list's arguments are not alternatives.
    kinds = (kind,) if typing.get_origin(kind) is tuple else typing.get_args(kind) or (kind,)
    return " or ".join(_TYPE_NAMES[each] for each in kinds)


_TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false (bool)",
    types.NoneType: "null",
    tuple[int, ...]: "a list of integers",
    tuple[float, ...]: "a list of numbers",
}


def get(config: RunConfig, key: str) -> Any:
    """The value of a dotted key; None for an entry of `OPEN_KEYS` that is not set."""
    if _is_open(key):
        mapping, _, name = key.rpartition(".")
        return operator.attrgetter(mapping)(config).get(name)
    return operator.attrgetter(key)(config)


def with_settings(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The configuration with other values of dotted keys.

    Raises:
        SettingError: a key is unknown, or a value is not of its type.
    """
    return with_typed(config, {key: typed(key, value) for key, value in settings.items()})


def with_typed(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The configuration with other values of dotted keys, which are of their types; None removes an entry of
    `OPEN_KEYS`."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        if section in OPEN_KEYS:
            entries = {**values.get(section, get(config, section)), name: value}
            values[section] = {entry: each for entry, each in entries.items() if each is not None}
        else:
            values[key] = value
    return changed(config, values)


def unset_keys(config: RunConfig) -> list[str]:
    """Keys that have no default and were given no value."""
    return [key for key, value in items(config) if value == MISSING] if MISSING in _values(config) else []


def items(config: RunConfig) -> Iterable[tuple[str, Any]]:
    """Every dotted key with its value."""
    named = ((f"{key}.{name}", value) for key in OPEN_KEYS for name, value in get(config, key).items())
    return itertools.chain(zip(KEYS, _values(config), strict=True), named, config.gone.items())


_values: Callable[[RunConfig], tuple[Any, ...]] = operator.attrgetter(*KEYS)
"""The values of `KEYS`: a thousand configurations have a hundred thousand."""


def flatten(mapping: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys: `{train: {steps: 3}}` is `{train.steps: 3}`.

    An empty section gives no key; an empty mapping elsewhere stays a value, which `typed` refuses.

    Raises:
        SettingError: a key is given both with dots and in its section.
    """
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        dotted = f"{prefix}{key}"
        is_section = isinstance(value, Mapping) and (value or dotted in (*SECTIONS, *OPEN_KEYS))
        entries = flatten(value, prefix=f"{dotted}.") if is_section else {dotted: value}
        if duplicates := sorted(flat.keys() & entries.keys()):
            raise SettingError(duplicates[0], "is given twice, with dots and in its section")
        flat |= entries
    return flat


_ALWAYS_HASHED = frozenset(
    f"{section}.{name}"
    for section, names in {
        "schedule": "name microbatches delay ahead chunks update_interval",
        "optimizer": "name lr weight_decay warmup final_lr momentum nesterov beta1 beta2 eps momentum_decay "
        "scale iteration precision auxiliary_lr_ratio row_beta2 row_eps refresh_interval beta3 gamma radius "
        "sign_radius constrained source geometry stage_aware",
        "error_feedback": "coefficient form decay_at",
        "correction": "name flavour reach anneal memory strength sync_steps",
        "model": "name layers width heads kv_heads mlp_width vocab_size rope_base norm_eps factory "
        "init_sha256",
        "data": "path sha256 context validation_share",
        "parallel": "stages cut data",
        "train": "steps microbatch_size eval_interval eval_microbatches clip clip_norm max_skipped precision "
        "recompute compile checkpoint_interval",
    }.items()
    for name in names.split()
) | {"seed"}
"""Keys that are hashed at their default, too. The list does not grow: any other key is hashed where it
differs from its default, so that a new key leaves the ids of runs that do not use it as they are."""

_HASHED_AS: Mapping[str, Mapping[Any, bool]] = {
    "train.recompute": {"none": False, "full": True},
    "train.compile": {None: False},
}
"""How values enter the hash, where not as they are."""


def config_hash(config: RunConfig) -> str:
    """SHA-256 of a run's identity, 64 hexadecimal digits: runs that compute the same have the same hash."""
    content = identity(config)
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def identity(config: RunConfig) -> dict[str, Any]:
    """The settings that make a run what it is, by dotted key.

    `site` and the paths of initial weights and data are left out; their contents stand for them
    (`model.init_sha256`, `data.sha256`, `data.validation_sha256`). Without a hash the path of the data is
    kept. The standard library's text is left out, so that ids do not depend on the version of Python.
    """
    has_hash = bool(config.data.trained_paths) and config.data.sha256 is not None
    excluded = {"model.init", "data.path" if has_hash else "data.sha256", *_SITE_KEYS}
    if has_hash:
        excluded |= config.data.trained_paths.keys() | {"data.dtype"}
    excluded |= {f"data.validation.{name}" for name in config.data.validation_sha256}
    return {
        key: _HASHED_AS[key].get(value, value) if key in _HASHED_AS else value
        for key, value in items(config)
        if (key in _ALWAYS_HASHED or value != DEFAULTS.get(key)) and key not in excluded
    }


DEFAULTS: Mapping[str, Any] = dict(items(RunConfig()))
"""The default of every key; entries of `OPEN_KEYS` have none."""
