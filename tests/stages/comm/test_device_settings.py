"""How GPUs are set up, as far as it can be seen without one."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stages.comm import handshake
from stages.comm.device_settings import (
    ENVIRONMENT,
    LINK_CTAS,
    DeviceSettingError,
    check_environment,
    set_environment,
    set_up_link,
)
from stages.comm.process import Process, abort_together, choose_device
from stages.config.run_config import SiteConfig


def test_environment_variables_already_set_are_kept() -> None:
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "16", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    set_environment(environment)
    assert environment == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "16",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_MODULE_LOADING": "EAGER",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_NCCL_COORD_CHECK_MILSEC": "30000",
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


def test_float32_is_not_rounded_whatever_an_image_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        choose_device(SiteConfig())
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_handshake_sets_the_environment_before_it_asks_for_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting in ENVIRONMENT:
        monkeypatch.setenv(setting.name, "")  # so that it is restored
        monkeypatch.delenv(setting.name)
    seen: dict[str, str] = {}

    class AskedError(Exception):
        pass

    def asked() -> dict[str, object]:
        seen.update(os.environ)
        raise AskedError

    monkeypatch.setattr(handshake, "torch_info", asked)
    monkeypatch.setattr(sys, "argv", ["handshake", "0", str(tmp_path), "here"])
    with pytest.raises(AskedError):
        handshake.main()
    assert {setting.name: seen.get(setting.name) for setting in ENVIRONMENT} == {
        setting.name: setting.value for setting in ENVIRONMENT
    }


def test_communicators_are_aborted_within_one_group() -> None:
    """All of them, even where one is gone already."""
    calls: list[str] = []

    def communicator(number: int) -> Any:
        def abort() -> None:
            calls.append(f"abort {number}")
            if number == 1:
                raise RuntimeError("already gone")

        start, end = (partial(calls.append, word) for word in ("start", "end"))
        return SimpleNamespace(_group_start=start, _group_end=end, abort=abort)

    abort_together([communicator(number) for number in range(3)])
    assert calls == ["start", "abort 0", "abort 1", "abort 2", "end"]
    abort_together([])


def test_a_communicator_is_named_and_outlasts_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL counts from when an operation is posted; its flight recorder tells communicators apart by name."""
    made: list[Any] = []

    class Recorded:
        Options = lambda: SimpleNamespace(config=SimpleNamespace())  # noqa: E731

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            made.append((rank, size, options))

        def eager_connect_single_device(self, device: torch.device) -> None:
            assert device.type == "cuda"

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Recorded, raising=False)
    site = SiteConfig(timeout=60)
    process = Process(
        rank=5,
        size=8,
        local_rank=1,
        device=torch.device("cuda", 1),
        timeout=timedelta(seconds=site.timeout),
        start_timeout=timedelta(seconds=site.start_timeout),
        address="",
        member=None,  # type: ignore[arg-type]
        store=torch.distributed.HashStore(),
        meetings=None,  # type: ignore[arg-type]
        host_staged=False,
        pids=[],
    )
    process.link("gradients 5 to 4", [5, 4])
    process.communicator("pipeline 1", [1, 3, 5, 7])
    (of_link, of_pair, link), (of_group, of_all, group) = made
    assert (of_link, of_pair, of_group, of_all) == (0, 2, 2, 4)
    assert (link.group_name, group.group_name) == ("gradients 5 to 4", "pipeline 1")
    assert link.global_ranks_in_group == [5, 4]
    # The watchdog of the ranks ends a run after two timeouts.
    assert link._timeout == group._timeout == timedelta(seconds=180)
    assert link.config.max_ctas == LINK_CTAS
    assert not hasattr(group.config, "max_ctas")
