"""Values of a configuration's keys."""

from __future__ import annotations

import datetime
from itertools import product
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncpp_cli.runs.settings import KEYS, LIST_KEYS, SettingError, typed
from stages.config.run_config import RunConfig

VALUES = [
    True,
    False,
    0,
    1,
    -3,
    3.0,
    -0.5,
    1e300,
    "x",
    "",
    "a b",
    "${a}",
    None,
    datetime.date(2020, 1, 1),
    b"x",
]


def test_a_value_is_what_omegaconf_makes_of_it() -> None:
    reference = OmegaConf.structured(RunConfig)
    for key, value in product(KEYS, VALUES):
        if key in LIST_KEYS:
            continue
        try:
            OmegaConf.update(reference, key, value)
            expected = OmegaConf.select(reference, key)
        except OmegaConfBaseException:
            expected = SettingError
        if isinstance(value, bool) and isinstance(expected, str):
            expected = SettingError  # no text: the YAML reader has made a bool of what looks like one
        found: Any
        try:
            found = typed(key, value)
        except SettingError:
            found = SettingError
        assert (type(found), found) == (type(expected), expected), (key, value)
