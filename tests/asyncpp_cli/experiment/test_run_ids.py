"""What a run's id is made of: versions of the program agree on it, or they would train everything anew."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncpp_cli.experiment.matrix import expand
from asyncpp_cli.experiment.settings import LATER_KEYS, SITE, assign, config_hash, copy_of, get, items
from asyncpp_cli.experiment.template import load
from stages.config import RunConfig
from stages.validation import ConfigError, check

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


def test_texts_of_a_key_that_was_a_bool_are_hashed_as_it_was() -> None:
    """The id is of a version whose `train.recompute` was true or false."""
    ids = {}
    for value in (True, "full", False, "none", "selective"):
        config = copy_of(QUICKSTART[2].config)
        assign(config, {"train.recompute": value})
        ids[value] = config_hash(config)[:8]
    assert ids[True] == ids["full"] == "0724b0e2"
    assert ids[False] == ids["none"] == "9e981ded"
    assert len(set(ids.values())) == 3
    for unknown in (1, "maybe"):
        assign(config, {"train.recompute": unknown})
        with pytest.raises(ConfigError, match="accepted: none, selective, full"):
            check(config)


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
