"""Values of a configuration's keys."""

from __future__ import annotations

from typing import Any

import pytest

from asyncpp_cli.runs.settings import SettingError, config_hash, typed, with_settings
from stages.config.run_config import RunConfig

ACCEPTED = [
    ("optimizer.lr", 3, 3.0),
    ("optimizer.weight_decay", -0.0, 0.0),
    ("train.steps", 3, 3),
    ("model.tied", True, True),
    ("data.path", "007", "007"),
    ("data.path", None, None),
    ("parallel.cut", [3.0, 1.5], (3, 1.5)),
    ("data.weights.web", 2, 2.0),
    ("optimizer.options.beta", True, True),
    ("optimizer.options.beta", "x", "x"),
]
REFUSED = [
    ("train.steps", 3.0, "must be an integer, not 3.0"),
    ("train.steps", True, "must be an integer, not true"),
    ("train.steps", "3", 'must be an integer, not "3"'),
    ("train.steps", 2**63, "fits into 64 bits"),
    ("optimizer.lr", 10**400, "fits into 64 bits"),
    ("optimizer.lr", float("nan"), "must be a finite number, not nan"),
    ("optimizer.lr", "${seed}", "must be a number"),
    ("model.tied", 1, "must be true or false"),
    ("data.path", 1.1, "write text that looks like a number in quotes"),
    ("data.sources.web", "", "must be text or null"),
    ("parallel.cut", [], "must be a list of numbers or null"),
    ("parallel.cut", [True], "must be a list of numbers or null"),
    ("parallel.cut", [1.0, float("inf")], "must be a finite number"),
    ("model.name", "???", "must be text"),
    ("optimizer.options.beta", {"a": 1}, "must be true or false"),
    ("train.stepz", 1, "did you mean train.steps"),
]


@pytest.mark.parametrize(("key", "value", "expected"), ACCEPTED)
def test_a_value_has_its_keys_type(key: str, value: Any, expected: Any) -> None:
    assert repr(typed(key, value)) == repr(expected)


@pytest.mark.parametrize(("key", "value", "why"), REFUSED)
def test_a_value_of_another_type_is_refused(key: str, value: Any, why: str) -> None:
    with pytest.raises(SettingError, match=why):
        typed(key, value)


def test_two_spellings_of_a_number_are_one_run() -> None:
    hashes = set()
    for zero in (0, 0.0, -0.0):
        config = RunConfig()
        config = with_settings(config, {"optimizer.weight_decay": zero})
        hashes.add(config_hash(config))
    assert len(hashes) == 1
