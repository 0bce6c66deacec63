"""Numbers that no run can have are refused by themselves, before anything is made of them."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from support.small_runs import small_config

from asyncpp_cli.runs.settings import KEYS, get, with_settings
from optimizers import CORRECTIONS, METHODS
from schedules import OPTIONS
from stages.config.keys import facts
from stages.config.limits import KEY_FACTS
from stages.config.run_config import (
    CORRECTION_NAMES,
    CorrectionConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    changed,
)
from stages.resolve.checks import ConfigError, check
from stages.shape.families import FAMILIES
from stages.update.lr_schedule import SCHEDULES

WHOLE = [key for key in KEYS if isinstance(get(RunConfig(), key), int)]
BROKEN = [key for key in KEYS if isinstance(get(RunConfig(), key), float)]
WITHOUT_DEFAULT = ["optimizer.eps", "correction.strength", "site.memory_gb"]


def refused(config: RunConfig) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        check(config)
    assert len(str(error.value)) < 300
    return error.value


@pytest.mark.parametrize("key", [key for key in WHOLE if key != "train.compile"])
@pytest.mark.parametrize(
    "value", [10**9 + 1, 2**62, 10**30, -(10**400)], ids=["1e9", "2^62", "1e30", "-1e400"]
)
def test_a_count_that_no_run_has_is_refused_at_once(key: str, value: int) -> None:
    config = changed(small_config(), {key: value})
    section, _, name = key.rpartition(".")
    owner = get(config, section) if section else config
    [declared] = [field for field in fields(owner) if field.name == name]
    if 0 < value <= facts(declared).high:
        check(config)
    else:
        assert refused(config).key == key


@pytest.mark.parametrize("key", [*BROKEN, *WITHOUT_DEFAULT])
@pytest.mark.parametrize("value", [1e300, 1e308, -1e308])
def test_a_number_that_float32_or_a_clock_cannot_hold_is_refused(key: str, value: float) -> None:
    config = small_config()
    config = with_settings(config, {key: value})
    assert refused(config).key == key


def test_large_settings_within_the_bounds_are_accepted() -> None:
    config = small_config(layers=1000, microbatches=512, stages=64)
    check(replace(config, seed=2**63 - 1))


def test_names_that_a_key_accepts_are_those_of_its_catalogue() -> None:
    assert KEY_FACTS["model.family"].choices == tuple(FAMILIES)
    assert KEY_FACTS["optimizer.schedule"].choices == tuple(SCHEDULES)


def test_every_option_of_schedules_optimizers_and_corrections_is_a_key_of_its_type() -> None:
    assert OPTIONS.keys() <= {field.name for field in fields(ScheduleConfig)}
    corrections = [CORRECTIONS[name] for name in CORRECTION_NAMES]
    for section, methods in ((OptimizerConfig, METHODS.values()), (CorrectionConfig, corrections)):
        declared = [item for method in methods for item in method.options.items()]
        keys = {field.name: field.type for field in fields(section) if facts(field).option}
        assert {(name, f"{type(option.default).__name__} | None") for name, option in declared} == set(
            keys.items()
        )
