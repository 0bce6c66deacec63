"""Reads and writes a run's configuration file, config.yaml."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from asyncpp_cli.base.errors import DamagedError
from asyncpp_cli.runs.settings import SECTIONS, SettingError, flatten, unset_keys, with_settings
from stages.config.records import read_text
from stages.config.run_config import GONE, RunConfig

# libyaml's reader and writer in C, if PyYAML was built with them, are ten times as fast.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def config_text(config: RunConfig) -> str:
    """The configuration as YAML."""
    # Section by section, cached: the writer is slow, and the cells of a matrix share most sections.
    texts = [msgspec.json.encode({key: entry}) for key, entry in vars(config).items() if key != "gone"]
    return "".join(map(_entry_text, texts))


@functools.lru_cache(maxsize=10_000)
def _entry_text(entry: bytes) -> str:
    """A top-level entry of a configuration, given as JSON, as YAML."""
    return str(yaml.dump(json.loads(entry), Dumper=_Dumper, sort_keys=False))


def _by_entries(text: str) -> RunConfig | None:
    """The configuration in a text, read entry by entry, as it is written; None if that is not its form."""
    entries: dict[str, Any] = {}
    gone: dict[str, Any] = {}
    for entry in _ENTRIES.split(text):
        try:
            key, value, gone_of_entry = _read_entry(entry)
        except (yaml.YAMLError, ValueError, RecursionError, SettingError):
            return None  # to be named with its place in the whole
        entries[key] = value
        gone |= gone_of_entry
    return RunConfig(**entries, gone=gone)


_ENTRIES = re.compile(r"(?<=\n)(?=[a-z])")


@functools.lru_cache(maxsize=10_000)
def _read_entry(entry: str) -> tuple[str, Any, Mapping[str, Any]]:
    """A top-level key, its value (a section with all its keys set, or a number), and what is gone of it.

    Raises:
        ValueError: it is none.
    """
    content = yaml.load(entry, Loader=_Loader)
    if not isinstance(content, dict) or len(content) != 1 or not content.keys() <= {*SECTIONS, "seed"}:
        raise ValueError("not one entry")
    [key], config = content, _of(content)
    return key, getattr(config, key), config.gone


def _of(content: Mapping[str, Any]) -> RunConfig:
    """The configuration of these sections.

    Raises:
        SettingError: a key is unknown, or a value is not of its type.
    """
    settings = flatten(content)
    gone = {key: settings.pop(key, default) for key, default in GONE.items()}
    gone = {key: value for key, value in gone.items() if value != GONE[key]}
    return with_settings(RunConfig(gone=gone), settings)


def read_config(file: Path) -> RunConfig:
    """Read the configuration in a run's config.yaml.

    Raises:
        DamagedError: the file is missing, or is not a complete run configuration.
    """
    try:
        text = read_text(file)
        config = _by_entries(text)
        if config is None:
            content = yaml.load(text, Loader=_Loader)
            if not isinstance(content, dict):
                raise DamagedError(f"{file} is not a run's configuration")
            config = _of(content)
    except FileNotFoundError as error:
        raise DamagedError(f"{file} cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # PyYAML also raises these for invalid dates, integers of 5000 digits and endless nesting.
        raise DamagedError(f"{file} is not YAML") from error
    except SettingError as error:
        raise DamagedError(f"{file}: {error.key}: {error}") from error
    if missing := unset_keys(config):
        raise DamagedError(f"{file}: {missing[0]} is missing")
    return config
