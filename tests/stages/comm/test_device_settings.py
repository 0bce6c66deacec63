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
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_MODULE_LOADING": "EAGER",
        "NCCL_RUNTIME_CONNECT": "0",
    }
    empty: dict[str, str] = {}
    set_environment(empty)
    assert empty == {setting.name: setting.value for setting in ENVIRONMENT}


@pytest.mark.parametrize(
    ("name", "fine", "refused"),
    [
        ("CUDA_LAUNCH_BLOCKING", ("", "0"), "1"),
        ("TORCH_NCCL_BLOCKING_WAIT", ("0", "false"), "1"),
        ("NCCL_BLOCKING_WAIT", ("0",), "1"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", ("8", "32"), "1"),
        ("CUDA_MODULE_LOADING", ("EAGER", "eager"), "LAZY"),
    ],
)
def test_several_ranks_are_refused_where_the_host_would_wait_for_the_device(
    name: str, fine: tuple[str, ...], refused: str
) -> None:
    for value in fine:
        check_environment({name: value}, ranks=2)
    check_environment({name: refused}, ranks=1)
    with pytest.raises(DeviceSettingError, match=f"{name} is {refused}: the 2 ranks .* accepted: unset, "):
        check_environment({name: refused}, ranks=2)
    own: dict[str, str] = {}
    set_environment(own)
    check_environment(own, ranks=2)


def test_links_take_few_multiprocessors_and_go_first() -> None:
    options = SimpleNamespace(config=SimpleNamespace(max_ctas=32), is_high_priority_stream=False)
    set_up_link(options)
    assert (options.config.max_ctas, options.is_high_priority_stream) == (LINK_CTAS, True)
