"""How GPUs are set up, as far as it can be seen without one."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import stages.comm.process
from schedules import build
from stages.comm import handshake
from stages.comm.device_settings import (
    ENVIRONMENT,
    LINK_CTAS,
    STAR_CTAS,
    DeviceSettingError,
    check_environment,
    check_precision,
    check_queues,
    set_environment,
    set_up_link,
)
from stages.comm.process import Process, abort_together, choose_device, connected
from stages.comm.rendezvous.client import Member
from stages.comm.topology import connect
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
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
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
        ("NCCL_LAUNCH_ORDER_IMPLICIT", ("0",), "1"),
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
    for ranks, most in ((2, LINK_CTAS), (8, STAR_CTAS)):
        set_up_link(options, ranks=ranks)
        assert (options.config.max_ctas, options.is_high_priority_stream) == (most, True)


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


def test_communicators_are_aborted_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may wait for another's kernels to end; one that is gone, or never ends, holds up nobody."""
    monkeypatch.setattr(stages.comm.process, "SECONDS_TO_ABORT", 0.5)
    begun = [threading.Event() for _ in range(3)]
    aborted = []

    def abort(number: int) -> None:
        begun[number].set()
        if number == 1:
            raise RuntimeError("already gone")
        if number == 2:
            threading.Event().wait()
        assert all(other.wait(10.0) for other in begun)
        aborted.append(number)

    abort_together([SimpleNamespace(abort=partial(abort, number)) for number in range(3)])
    assert aborted == [0]
    abort_together([])


def test_the_other_ranks_hear_of_a_failure_before_nccl_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    close = Member.close

    def closing(member: Member, *, failure: str | None) -> None:
        heard.append(str(failure))
        close(member, failure=failure)

    def fail() -> None:
        place: dict[str, int] = {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1}
        with connected(**place, rendezvous=tmp_path, site=SiteConfig(device="cpu")) as process:
            nccl: Any = SimpleNamespace(abort=partial(heard.append, "aborted"))
            process.connected.append(nccl)
            raise OSError("the disk is gone")

    monkeypatch.setattr(Member, "close", closing)
    with pytest.raises(OSError, match="the disk"):
        fail()
    assert heard == ["OSError: the disk is gone", "aborted"]


def test_parts_of_one_gpu_are_one_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes by the address; each part has a UUID of its own."""
    names = []
    for part in range(2):
        properties = SimpleNamespace(
            pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0, uuid=f"MIG-{part}", name="H100"
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, own=properties: own)
        names.append(stages.comm.process._gpu(torch.device("cuda", 0)))
    assert names[0] == names[1] is not None
    assert names[0][1] == "0000:3b:00.0"


@pytest.mark.parametrize(
    ("capability", "precision", "refused"),
    [((7, 5), "bfloat16", True), ((7, 5), "float32", False), ((8, 0), "bfloat16", False)],
)
def test_bfloat16_is_refused_where_a_gpu_does_not_compute_in_it(
    capability: tuple[int, int], precision: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    expected = pytest.raises(DeviceSettingError, match=r"Tesla T4 \(compute capability 7.5\)")
    with expected if refused else nullcontext():
        check_precision(torch.device("cuda", 0), precision)
    check_precision(torch.device("cpu"), precision)


@pytest.mark.parametrize(
    ("communicators", "variable", "refused"),
    [
        (30, "32", None),
        (6, "8", None),
        (31, "32", "needs 33 queues .* CUDA has 32; accepted: fewer parallel.stages"),
        (10, "8", "needs 12 queues .* CUDA_DEVICE_MAX_CONNECTIONS is 8; accepted: unset, 12 to 32"),
        (31, "64", "needs 33 queues .* CUDA has 32"),
    ],
)
def test_each_communicator_has_a_queue_of_its_own(
    communicators: int, variable: str, refused: str | None
) -> None:
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": variable}
    if refused is None:
        check_queues(environment, communicators=communicators)
        return
    with pytest.raises(DeviceSettingError, match=refused):
        check_queues(environment, communicators=communicators)


def test_a_run_with_more_communicators_than_queues_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    options = {"microbatches": 32, "steps": 1, "delay": 2, "shard_head": True, "tied": True}
    program = build("2bw-v", stages=16, **options)
    process: Any = SimpleNamespace(device_waits=True, size=16, rank=0)
    with pytest.raises(DeviceSettingError, match="needs 40 queues"):
        connect(process, program, shape=(2,), dtype=torch.float32, common_step=True)


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
