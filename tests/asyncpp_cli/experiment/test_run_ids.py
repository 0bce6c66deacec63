"""What a run's id is made of: versions of the program agree on it, or they would train everything anew."""

from __future__ import annotations

from typing import Any

import pytest

from asyncpp_cli.experiment.matrix import expand
from asyncpp_cli.experiment.template import load
from asyncpp_cli.runs.settings import SITE, SettingError, assign, config_hash, copy_of, items
from stages.config.run_config import RunConfig
from stages.validation import ConfigError, check

QUICKSTART = expand(load("quickstart", []))


def test_ids_of_the_quickstart_are_those_of_the_first_version() -> None:
    assert [resolved.cell.id for resolved in QUICKSTART] == [
        "1f1b-muon-ef0-nano-s0-d01f6ade",
        "2bw-muon-ef0-nano-s0-3350eb9e",
        "2bw-muon-ef1-nano-s0-fd1bed7d",
        "1f1b-adamw-ef0-nano-s0-189d2753",
        "2bw-adamw-ef0-nano-s0-9e981ded",
        "2bw-adamw-ef1-nano-s0-6bf85f93",
    ]


def with_value(key: str, value: Any) -> RunConfig:
    section, _, name = key.rpartition(".")
    config = copy_of(QUICKSTART[4].config)
    setattr(getattr(config, section) if section else config, name, value)
    return config


@pytest.mark.parametrize(
    ("key", "value", "begins"),
    [
        ("train.recompute", "none", "9e981ded"),
        ("train.recompute", "full", "0724b0e2"),
        ("train.compile", None, "9e981ded"),
        ("train.compile", False, "9e981ded"),
    ],
)
def test_ids_of_values_that_are_hashed_as_others(key: str, value: object, begins: str) -> None:
    assert config_hash(with_value(key, value)).startswith(begins)


def check_with(key: str, value: object) -> None:
    config = copy_of(QUICKSTART[4].config)
    assign(config, {key: value})
    check(config)


@pytest.mark.parametrize("value", [True, False, 1, "maybe"])
def test_recompute_takes_its_names_alone(value: object) -> None:
    with pytest.raises((SettingError, ConfigError), match=r"must be text|accepted: none, selective, full"):
        check_with("train.recompute", value)


def test_every_key_counts_where_it_is_set() -> None:
    """Those of the site, and the paths of what is known by its content, do not."""
    keys = [key for key, _ in items(RunConfig()) if not key.startswith(f"{SITE}.")]
    hashes = {key: config_hash(with_value(key, 0.5)) for key in keys}
    assert {key for key in keys if hashes[key] == config_hash(QUICKSTART[4].config)} == {
        "model.init",
        "data.sha256",
    }
    assert len(set(hashes.values())) == len(keys) - 1
