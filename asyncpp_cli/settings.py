"""Run configurations by dotted key: the keys, what a value must be, and reading, writing and hashing.

The types stand in `stages.config`. OmegaConf checks every value against them; each pair of key and value is
checked once, since the cells of a matrix repeat them.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import math
import operator
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncpp_cli.errors import DamagedError
from stages.config import RunConfig


class SettingError(Exception):
    """A key or a value that no run configuration has. `key` is dotted."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


SECTIONS: dict[str, tuple[str, ...]] = {
    name: tuple(entry.name for entry in dataclasses.fields(section))
    for name, section in vars(RunConfig()).items()
    if dataclasses.is_dataclass(section)
}
"""The keys of each section."""

KEYS: tuple[str, ...] = tuple(
    key
    for top in dataclasses.fields(RunConfig)
    for key in (
        [f"{top.name}.{entry}" for entry in SECTIONS[top.name]] if top.name in SECTIONS else [top.name]
    )
)
"""Every dotted key of a run configuration, in order."""

LIST_KEYS = ("parallel.cut",)
"""Those whose value is a list of integers."""

SITE = "site"
"""The section that is no part of a run's identity."""


def check_key(key: str) -> None:
    """Refuse a key that no run configuration has.

    Raises:
        SettingError: with the nearest accepted key, or else those of the same section.
    """
    if key in KEYS:
        return
    section = key.partition(".")[0]
    if near := _nearest(key):
        raise SettingError(key, f"unknown key; did you mean {near}?")
    accepted = [entry for entry in KEYS if entry.startswith(f"{section}.")] or [*SECTIONS, "seed"]
    raise SettingError(key, f"unknown key; accepted: {', '.join(accepted)}")


def _nearest(key: str) -> str | None:
    """The accepted key that `key` may be a slip of, if any.

    Names are compared without their section: what a section's keys share would make any two of them alike.
    """
    section, _, name = key.rpartition(".")
    if section in SECTIONS:
        names = {known.partition(".")[2]: known for known in KEYS if known.startswith(f"{section}.")}
        if found := difflib.get_close_matches(name, names, n=1, cutoff=_ALIKE):
            return names[found[0]]
        elsewhere = [known for known in KEYS if known.rpartition(".")[2] == name]
        return elsewhere[0] if len(elsewhere) == 1 else None
    if near := difflib.get_close_matches(section or name, [*SECTIONS, "seed"], n=1, cutoff=_ALIKE):
        meant = f"{near[0]}.{name}" if section else near[0]
        return meant if meant in KEYS or meant in SECTIONS else near[0]
    elsewhere = [known for known in KEYS if known.rpartition(".")[2] == name]
    return elsewhere[0] if len(elsewhere) == 1 else None


_ALIKE = 0.7
"""Of difflib's ratio: `stepz` and `steps` have 0.8, `tied` and `width` 0.44."""


def typed(key: str, value: Any) -> Any:
    """The value as the key's type has it (an integer becomes a float where the key holds one).

    Raises:
        SettingError: the key is unknown, or the value is not of its type.
    """
    check_key(key)
    if key in LIST_KEYS and isinstance(value, list):
        if any(isinstance(item, bool) or not isinstance(item, int) for item in value) or not value:
            raise SettingError(key, f"must be {_field_type(key)}, not {_printed(value)}")
        return list(value)
    if isinstance(value, list | Mapping):
        raise SettingError(key, f"takes one value, not {_printed(value)}")
    return _typed(key, value)


@functools.lru_cache(maxsize=100_000, typed=True)  # typed: True, 1 and 1.0 are equal, but not accepted alike
def _typed(key: str, value: Any) -> Any:
    expected = _field_type(key)
    if isinstance(value, bool) and "bool" not in expected:
        raise SettingError(key, f"must be {expected}, not {_printed(value)}")
    if isinstance(value, str) and "text" not in expected:
        # The YAML reader has made a number of everything that looks like one.
        raise SettingError(key, f"must be {expected}, not {_printed(value)}")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise SettingError(key, f"must be {expected}, and an integer fits into 64 bits with its sign")
    if isinstance(value, int | float) and expected.startswith("text"):
        value = str(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingError(key, f"must be a finite number, not {value}")
    if value == MISSING:
        # OmegaConf's mark for a value that is to come: it would read it as none.
        raise SettingError(key, f'must be {expected}, and "{MISSING}" stands for no value')
    config = _typed_config()
    try:
        OmegaConf.update(config, key, value)
        return OmegaConf.select(config, key)
    except OmegaConfBaseException as error:
        raise SettingError(key, f"must be {expected}, not {_printed(value)}") from error


@functools.cache
def _typed_config() -> DictConfig:
    # One for all: setting a key again leaves nothing of its earlier value.
    config: DictConfig = OmegaConf.structured(RunConfig)
    return config


def _field_type(key: str) -> str:
    """The type of a key's values, in words."""
    section, _, name = key.rpartition(".")
    owner = type(getattr(RunConfig(), section)) if section else RunConfig
    hint = typing.get_type_hints(owner)[name]
    kinds = typing.get_args(hint) or (hint,)
    return " or ".join(_IN_WORDS[kind] for kind in kinds)


_IN_WORDS = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false (bool)",
    types.NoneType: "null",
    list[int]: "a list of integers",
}


def _printed(value: Any) -> str:
    return json.dumps(value, default=str)


def get(config: RunConfig, key: str) -> Any:
    """The value of a dotted key."""
    return operator.attrgetter(key)(config)


def assign(config: RunConfig, settings: Mapping[str, Any]) -> None:
    """Set dotted keys of a configuration, in place.

    Raises:
        SettingError: a key is unknown, or a value is not of its type.
    """
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        setattr(get(config, section) if section else config, name, typed(key, value))


def unset_keys(config: RunConfig) -> list[str]:
    """Keys that have no default and were given no value."""
    return [key for key, value in items(config) if value == MISSING]


def items(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Every dotted key with its value."""
    for key in KEYS:
        yield key, get(config, key)


def flatten(mapping: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys: `{train: {steps: 3}}` is `{train.steps: 3}`.

    Raises:
        SettingError: a key is given in both ways.
    """
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        dotted = f"{prefix}{key}"
        entries = flatten(value, prefix=f"{dotted}.") if isinstance(value, Mapping) else {dotted: value}
        if twice := sorted(flat.keys() & entries.keys()):
            raise SettingError(twice[0], "is given twice, with dots and in its section")
        flat |= entries
    return flat


def copy_of(config: RunConfig) -> RunConfig:
    """An independent copy."""
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name)) for name in SECTIONS}
    )


LATER_KEYS = frozenset({"optimizer.vector_beta1", "optimizer.vector_beta2", "train.deterministic"})
"""Keys that the first run ids did not know. They count only where they are set to something, so that a new
setting leaves the ids of the runs that do not use it as they were."""


def config_hash(config: RunConfig) -> str:
    """64 hexadecimal digits that two runs share if they compute the same: `site` is not in it.

    Nor is where initial weights and data lie: `model.init_sha256` and `data.sha256` say what they are. Where
    the data is not pinned so (runs of asyncpp 0.1) its path is hashed. The standard library's text goes by
    no hash, so that an id does not depend on the Python that made it.
    """
    defaults = RunConfig()
    data_key = (
        "data.sha256" if config.data.path is not None and config.data.sha256 is not None else "data.path"
    )
    left_out = {"model.init", "data.path", "data.sha256"} - {data_key}
    content = {
        key: value
        for key, value in items(config)
        if not key.startswith(f"{SITE}.")
        and key not in left_out
        and not (key in LATER_KEYS and value == get(defaults, key))
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# The C readers and writers of libyaml, where PyYAML was built with it, are ten times as fast.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def config_text(config: RunConfig) -> str:
    """The configuration as YAML."""
    # Section by section: the cells of a matrix differ in few, and the writer is slow.
    return "".join(_entry_text(json.dumps({key: entry})) for key, entry in dataclasses.asdict(config).items())


@functools.lru_cache(maxsize=10_000)
def _entry_text(entry: str) -> str:
    """One top-level entry of a configuration as YAML, given as JSON."""
    return str(yaml.dump(json.loads(entry), Dumper=_Dumper, sort_keys=False))


def read_config(file: Path) -> RunConfig:
    """The configuration in a run's config.yaml.

    Raises:
        DamagedError: the file is missing, or is not a complete run configuration.
    """
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
        if not isinstance(content, dict):
            raise DamagedError(f"{file} is not a run's configuration")
        config = RunConfig()
        assign(config, flatten(content))
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedError(f"{file} cannot be read ({error})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # Not only YAML's own error: a day that no month has, an integer of 5000 digits, mappings without end.
        raise DamagedError(f"{file} is not YAML") from error
    except SettingError as error:
        raise DamagedError(f"{file}: {error.key}: {error}") from error
    if missing := unset_keys(config):
        raise DamagedError(f"{file}: {missing[0]} is missing")
    return config
