"""How GPUs are set up, as far as it can be seen without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from stages.comm.device_settings import (
    ENVIRONMENT,
    LINK_CTAS,
    DeviceSettingError,
    check_environment,
    set_environment,
    set_up_link,
)


def test_environment_variables_already_set_are_kept() -> None:
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "16", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    set_environment(environment)
    assert environment == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "16",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
        "CUDA_MODULE_LOADING": "EAGER",
        "NCCL_RUNTIME_CONNECT": "0",
    }
    empty: dict[str, str] = {}
    set_environment(empty)
    assert empty == {setting.name: setting.value for setting in ENVIRONMENT}


def test_several_ranks_are_refused_where_every_launch_waits_for_the_device() -> None:
    for value in ({}, {"CUDA_LAUNCH_BLOCKING": "0"}, {"CUDA_LAUNCH_BLOCKING": ""}):
        check_environment(value, ranks=2)
    check_environment({"CUDA_LAUNCH_BLOCKING": "1"}, ranks=1)
    with pytest.raises(
        DeviceSettingError, match=r"CUDA_LAUNCH_BLOCKING is 1: the 2 ranks .* accepted: unset, 0"
    ):
        check_environment({"CUDA_LAUNCH_BLOCKING": "1"}, ranks=2)


def test_links_take_few_multiprocessors_and_go_first() -> None:
    options = SimpleNamespace(config=SimpleNamespace(max_ctas=32), is_high_priority_stream=False)
    set_up_link(options)
    assert (options.config.max_ctas, options.is_high_priority_stream) == (LINK_CTAS, True)
