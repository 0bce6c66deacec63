"""Numbers that no run can have are refused by themselves, before anything is made of them."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from support.small_runs import small_config

from asyncpp_cli.runs.settings import KEYS, assign, get
from optimizers import METHODS
from optimizers.options import Option
from stages.config.keys import facts, with_options
from stages.config.run_config import OptimizerConfig, RunConfig
from stages.validation import ConfigError, check

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
    config = small_config()
    section, _, name = key.rpartition(".")
    owner = get(config, section) if section else config
    setattr(owner, name, value)
    [declared] = [field for field in fields(owner) if field.name == name]
    if 0 < value <= facts(declared).high:
        check(config)
    else:
        assert refused(config).key == key


@pytest.mark.parametrize("key", [*BROKEN, *WITHOUT_DEFAULT])
@pytest.mark.parametrize("value", [1e300, 1e308, -1e308])
def test_a_number_that_float32_or_a_clock_cannot_hold_is_refused(key: str, value: float) -> None:
    config = small_config()
    assign(config, {key: value})
    assert refused(config).key == key


def test_large_settings_within_the_bounds_are_accepted() -> None:
    config = small_config(layers=1000, microbatches=512, stages=64)
    check(replace(config, seed=2**63 - 1))


def test_options_that_would_hide_a_key_or_another_option_are_refused() -> None:
    one, other = METHODS["adamw"], METHODS["muon"]
    with pytest.raises(TypeError, match="has a field of its own called lr"):
        with_options([replace(one, options={"lr": Option(default=0.1, meaning="")})])(OptimizerConfig)
    whole, part = Option(default=1, meaning=""), Option(default=0.5, meaning="")
    with pytest.raises(TypeError, match="two methods have an option rank, of other types"):
        with_options([replace(one, options={"rank": whole}), replace(other, options={"rank": part})])
