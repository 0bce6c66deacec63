"""What a run's id is made of: versions of the program agree on it, or they would train everything anew."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncpp_cli.experiment.matrix import expand
from asyncpp_cli.experiment.settings import LATER_KEYS, SITE, config_hash, get, items
from asyncpp_cli.experiment.template import load
from stages.config import RunConfig

QUICKSTART = expand(load("quickstart", []))


def test_ids_of_the_quickstart_are_those_of_the_first_version() -> None:
    assert [resolved.cell.id for resolved in QUICKSTART] == [
        "1f1b-adamw-ef0-nano-s0-189d2753",
        "1f1b-muon-ef0-nano-s0-d01f6ade",
        "2bw-adamw-ef0-nano-s0-9e981ded",
        "2bw-adamw-ef1-nano-s0-6bf85f93",
        "2bw-muon-ef0-nano-s0-3350eb9e",
        "2bw-muon-ef1-nano-s0-fd1bed7d",
    ]


@pytest.mark.parametrize("key", sorted(LATER_KEYS))
def test_a_later_key_counts_where_it_is_set(key: str) -> None:
    config = QUICKSTART[0].config
    assert get(config, key) == get(RunConfig(), key)
    section, _, name = key.partition(".")
    changed = replace(config, **{section: replace(getattr(config, section), **{name: 0.5})})
    assert config_hash(changed) != config_hash(config)


def test_later_keys_are_keys_of_what_is_hashed() -> None:
    keys = {key for key, _ in items(RunConfig()) if not key.startswith(f"{SITE}.")}
    assert keys >= LATER_KEYS


def test_a_run_keeps_its_id_where_null_became_the_default_of_compiling() -> None:
    config = QUICKSTART[0].config
    ids = [
        config_hash(replace(config, train=replace(config.train, compile=value)))
        for value in (False, None, True)
    ]
    assert ids[0] == ids[1] != ids[2]
