"""`asyncpp doctor`: this machine for real, and what it says of clusters that are not fit."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from support.command_line import asyncpp, ran
from support.launches import TINY

from asyncpp_cli.doctor import node_check
from asyncpp_cli.doctor.checks import Check, folder_check, gpu_check, submission_check
from asyncpp_cli.doctor.job import handshake_checks, software_check
from asyncpp_cli.launch.common.snapshot import copy_code
from asyncpp_cli.sites.profile import Site, find_site
from stages.comm.handshake import transport

FILE = Path("mine.yaml")
SITE = Site(name="mine", file=FILE)
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


@pytest.mark.slow
def test_this_machine_is_fit_and_torch_is_asked_in_other_processes(tmp_path: Path) -> None:
    code = (
        "import sys; from asyncpp_cli.main import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    asked = ran(sys.executable, "-P", "-c", code, "doctor", "--json", "--dir", tmp_path)
    assert asked.code == 0, asked.output
    assert asked.errors.strip() == "False"
    checks = {check["check"]: check for check in json.loads(asked.output)}
    assert {"torch", "gloo", "folder"} <= set(checks)
    assert all(set(check) == {"check", "ok", "detail", "advice"} for check in checks.values())
    assert metadata.version("torch") in checks["torch"]["detail"]
    assert str(tmp_path) in checks["folder"]["detail"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_wrong(tmp_path: Path) -> None:
    assert folder_check(tmp_path / "not" / "yet").ok
    if Path("/proc/self").is_dir():
        found = folder_check(Path("/proc"))
        assert (found.ok, "cannot be written" in found.detail) == (False, True)


def test_permissions_that_are_not_kept_or_open_to_everybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0)
    try:
        found = folder_check(tmp_path)
        small = [*TINY, "matrix.schedule=[1f1b]", "matrix.optimizer=[adamw]", "matrix.error_feedback=[0]"]
        swept = asyncpp("sweep", "quickstart", *small, "train.steps=2", "--out", tmp_path / "e")
    finally:
        os.umask(before)
    assert (found.verdict, "umask 022" in found.advice) == ("note", True)
    assert f"everybody may write {tmp_path}/e, and so run code as you: umask 022" in swept.errors
    assert folder_check(tmp_path).verdict == "ok"
    touch = Path.touch

    def touch_where_no_mode_is_kept(file: Path, **_: int) -> None:
        touch(file)
        file.chmod(0o777)

    monkeypatch.setattr(Path, "touch", touch_where_no_mode_is_kept)
    found = folder_check(tmp_path)
    assert (found.ok, "a file of mode 600 has mode 777" in found.detail) == (False, True)


def test_gpus_that_torch_does_not_see_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    without = gpu_check({"torch": "2.13", "gpus": [], "cuda": None})
    assert (without.ok, without.detail) == (False, "the driver shows 2, torch none (built for CUDA: no)")
    gpu = {"name": "H200", "memory": 140 * 2**30}
    seen = gpu_check({"torch": "2.13", "gpus": [gpu, gpu], "cuda": "13.0", "nccl_version": "2.29"})
    assert seen.detail.endswith("0: H200, 140 GiB; 1: H200, 140 GiB; CUDA 13.0, NCCL 2.29")


def test_without_slurm_here_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    found = submission_check(find_site("testcluster"))
    assert (found.check, found.ok, "sbatch" in found.detail) == ("submission", False, True)


def has(check: Check, word: str, advice: str) -> None:
    assert (check.verdict, advice in check.advice) == (word, True), check


def node_checks(folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    """The check of a node as it runs in a job."""
    file = shutil.copy(node_check.__file__, folder)
    command = [sys.executable, "-P", file]
    return subprocess.Popen(command, env=os.environ | environment)


def test_a_node_says_what_it_has(tmp_path: Path) -> None:
    assert node_checks(tmp_path).wait(timeout=60) == 0
    found = json.loads((tmp_path / "answer-0.json").read_text())
    assert found["host"] == socket.gethostname()
    assert software_check(found["versions"], alike=True).ok
    has(software_check(found["versions"] | {"torch": ""}, alike=True), "wrong", "Python environment")
    # In an image versions may differ.
    other = {"torch": "9.9", "msgspec": "0.19"}
    has(software_check(other, alike=True), "wrong", "shared disk")
    assert software_check(other, alike=False).ok
    has(software_check(other | {"torch": ""}, alike=False), "wrong", "set python")


def test_what_ranks_on_two_nodes_make_of_each_other() -> None:
    def of(met: dict[str, str]) -> list[Check]:
        return list(handshake_checks(SITE, "n1 and n2", met))

    [met] = of({"gloo": ""})
    assert (met.check, met.verdict) == ("two nodes", "ok")
    assert "n1 and n2 found each other" in met.detail
    over_gloo, over_nccl = of({"gloo": "", "nccl": "RuntimeError: no route to host"})
    assert over_gloo.ok
    has(over_nccl, "wrong", "network_interface")
    assert over_nccl.detail == "nccl: RuntimeError: no route to host"
    [met] = of({"problem": "No module named 'torch'"})
    has(met, "wrong", "Python environment")
    rates = {"gloo_rate": 1.25, "nccl_rate": 46.02}
    over_gloo, over_nccl = of({"gloo": "", "nccl": "", "nccl_transport": "NET/IB"} | rates)
    assert over_gloo.detail.endswith("exchanged tensors (gloo, 1.25 GB/s)")
    assert over_nccl.detail.endswith("exchanged tensors (nccl by NET/IB, 46 GB/s)")
    assert over_nccl.verdict == "ok"
    *_, over_tcp = of({"gloo": "", "nccl": "", "nccl_transport": "NET/Socket"} | rates)
    has(over_tcp, "note", "libibverbs")
    assert over_tcp.detail.endswith("(nccl by NET/Socket, 46 GB/s)")


def test_nccls_log_names_the_transport() -> None:
    log = """
        n1:7:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>
        n1:7:9 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
        n1:7:9 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/IB/1
        n1:7:9 [0] NCCL INFO Connected all rings"""
    assert transport(log.splitlines()) == "NET/IB"
    lines = ["Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0", "Channel 00 : 0[0] -> 1[1] via P2P/CUMEM"]
    assert transport(lines) == "NET/Socket, P2P"
    assert transport(["Channel 02 : 0[1a000] -> 1[1b000] via SHM/direct/direct"]) == "SHM"
    assert transport(["NCCL version 2.27.5+cuda12.9"]) == ""


@pytest.mark.slow
def test_two_tasks_of_a_job_shake_hands(tmp_path: Path) -> None:
    copy_code(tmp_path / "code")
    job = {"SLURM_NTASKS": "2", "GLOO_SOCKET_IFNAME": LOOPBACK}
    tasks = [node_checks(tmp_path, SLURM_PROCID=str(rank), **job) for rank in range(2)]
    assert [task.wait(timeout=100) for task in tasks] == [0, 0]
    found = json.loads((tmp_path / "handshake-0.json").read_text())
    assert (found["gloo"], found["gloo_rate"] > 0) == ("", True)
    assert json.loads((tmp_path / "handshake-1.json").read_text()) == {}


def test_a_task_whose_handshake_cannot_begin_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "code" / "0" / "stages"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libtorch.so: cannot open')")
    assert node_checks(tmp_path, SLURM_PROCID="1", SLURM_NTASKS="2").wait(timeout=100) == 0
    found = json.loads((tmp_path / "handshake-1.json").read_text())
    assert found == {"problem": "ImportError: libtorch.so: cannot open"}
