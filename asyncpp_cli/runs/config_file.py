"""Reads and writes a run's configuration file, config.yaml."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import yaml

from asyncpp_cli.base.errors import DamagedError
from asyncpp_cli.runs.settings import SettingError, assign, flatten, unset_keys
from stages.config.run_config import GONE, RunConfig

# libyaml's reader and writer in C, if PyYAML was built with them, are ten times as fast.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def config_text(config: RunConfig) -> str:
    """The configuration as YAML."""
    sections = dataclasses.asdict(config)
    del sections["gone"]
    # Section by section, cached: the writer is slow, and the cells of a matrix share most sections.
    return "".join(_entry_text(json.dumps({key: entry})) for key, entry in sections.items())


@functools.lru_cache(maxsize=10_000)
def _entry_text(entry: str) -> str:
    """A top-level entry of a configuration, given as JSON, as YAML."""
    return str(yaml.dump(json.loads(entry), Dumper=_Dumper, sort_keys=False))


def read_config(file: Path) -> RunConfig:
    """Read the configuration in a run's config.yaml.

    Raises:
        DamagedError: the file is missing, or is not a complete run configuration.
    """
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
        if not isinstance(content, dict):
            raise DamagedError(f"{file} is not a run's configuration")
        config = RunConfig()
        settings = flatten(content)
        gone = {key: settings.pop(key, default) for key, default in GONE.items()}
        config.gone = {key: value for key, value in gone.items() if value != GONE[key]}
        assign(config, settings)
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedError(f"{file} cannot be read ({error})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # PyYAML also raises these for invalid dates, integers of 5000 digits and endless nesting.
        raise DamagedError(f"{file} is not YAML") from error
    except SettingError as error:
        raise DamagedError(f"{file}: {error.key}: {error}") from error
    if missing := unset_keys(config):
        raise DamagedError(f"{file}: {missing[0]} is missing")
    return config
