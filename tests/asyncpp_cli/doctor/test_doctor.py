"""`asyncpp doctor`: this machine for real, and what it says of clusters that are not fit."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from support.command_line import refusal
from support.files import ROOT

from asyncpp_cli.doctor import node_check
from asyncpp_cli.doctor.checks import Check
from asyncpp_cli.doctor.cluster import (
    Node,
    cluster_checks,
    gpus_of,
    nodes_check,
    partition_check,
    preemption_check,
    requeue_check,
    submit_limit_check,
)
from asyncpp_cli.doctor.job import handshake_checks, image_check, network_check, software_check
from asyncpp_cli.doctor.machine import (
    NEWEST_TORCH,
    cores_check,
    folder_check,
    gpu_check,
    torch_check,
    within,
)
from asyncpp_cli.launch.common.snapshot import copy_code
from asyncpp_cli.sites.containers import Container
from asyncpp_cli.sites.profile import Site, find_site
from stages.comm.handshake import transport

FILE = Path("mine.yaml")
SITE = Site(name="mine", file=FILE)
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


@pytest.mark.timeout(150)
@pytest.mark.slow
def test_this_machine_is_fit_and_torch_is_asked_in_other_processes(tmp_path: Path) -> None:
    code = (
        "import sys; from asyncpp_cli.main import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    asked = subprocess.run(
        [sys.executable, "-P", "-c", code, "doctor", "--json", "--dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert asked.returncode == 0, asked.stdout
    assert asked.stderr.strip() == "False"
    checks = {check["check"]: check for check in json.loads(asked.stdout)}
    assert {"python", "cores", "torch", "gpus", "gloo", "compiler", "folder"} <= set(checks)
    assert all(set(check) == {"check", "ok", "detail", "advice"} for check in checks.values())
    assert metadata.version("torch") in checks["torch"]["detail"]
    assert str(tmp_path) in checks["folder"]["detail"]
    assert list(tmp_path.iterdir()) == []


def test_nonsensical_arguments_are_refused_in_one_line(tmp_path: Path) -> None:
    for arguments, message in (
        (["--job"], "--job is for clusters"),
        (["--dir", str(tmp_path / "none")], "no such folder"),
        (["--site", "nowhere"], "unknown site"),
    ):
        assert message in refusal("doctor", *arguments)


@pytest.mark.parametrize(
    ("version", "wanted", "accepted"),
    [
        ("2.13.0+cpu", ">=2.11", True),
        ("2.15.0", ">=2.11", True),
        ("2.11", "<2.14,>=2.11", True),
        ("2.10.1", ">=2.11", False),
        ("2.14.0", ">=2.11,<2.14", False),
        ("2.14.0.dev2026", ">=2.11,<2.14", False),
        ("3.9.1", ">=3.11", False),
        ("1.0", "", True),
    ],
)
def test_versions_are_compared_as_numbers(version: str, wanted: str, accepted: bool) -> None:
    assert within(version, wanted) is accepted
    assert torch_check(version, wanted=wanted).ok is accepted


def test_a_torch_newer_than_those_tested_is_noted() -> None:
    assert torch_check(f"{NEWEST_TORCH}.1+cu132", wanted=">=2.11").verdict == "ok"
    later = torch_check("2.99.0", wanted=">=2.11")
    assert (later.verdict, later.advice) == ("note", f"newer than {NEWEST_TORCH}, the newest tested")


def test_the_oldest_and_the_newest_torch_are_tested_for_each_change() -> None:
    workflow = (ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8")
    oldest = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert oldest is not None
    for version in (oldest[1], NEWEST_TORCH):
        assert f'torch: "{version}.*"' in workflow


def test_a_folder_that_cannot_be_written_is_wrong(tmp_path: Path) -> None:
    assert folder_check(tmp_path / "not" / "yet").ok
    if Path("/proc/self").is_dir():
        found = folder_check(Path("/proc"))
        assert not found.ok
        assert "cannot be written" in found.detail


def test_gpus_that_torch_does_not_see_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    without = gpu_check({"gpus": [], "cuda": None})
    assert (without.ok, without.detail) == (False, "the driver shows 2, torch none (built for CUDA: no)")
    gpu = {"name": "H200", "memory": 140 * 2**30}
    seen = gpu_check({"gpus": [gpu, gpu], "cuda": "13.0", "nccl_version": "2.29"})
    assert seen.detail == "0: H200, 140 GiB; 1: H200, 140 GiB; CUDA 13.0, NCCL 2.29"


def test_without_slurm_here_that_alone_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    [found] = cluster_checks(find_site("testcluster"), tmp_path)
    assert (found.check, found.ok) == ("slurm", False)
    assert "sbatch" in found.detail


def test_slurms_words_are_read() -> None:
    assert gpus_of("gpu:h100:8(S:0-1),nvme:1") == 8
    assert gpus_of("gpu:4") == 4
    assert gpus_of("gpu:a100:2,gpu:v100:1") == 3
    assert gpus_of("(null)") == 0


def has(check: Check, word: str, advice: str) -> None:
    assert (check.verdict, advice in check.advice) == (word, True), check


def test_a_partition_is_there_open_and_long_enough() -> None:
    there = {"gpu": {"PartitionName": "gpu", "State": "UP", "MaxTime": "12:00:00", "TotalNodes": "2"}}
    fits = replace(SITE, partition="gpu", time="12:00:00")
    assert partition_check(fits, there).verdict == "ok"
    has(
        partition_check(replace(fits, partition="cpu"), there), "wrong", "mine.yaml: partition: accepted: gpu"
    )
    has(partition_check(SITE, there), "wrong", "accepted: gpu")
    has(partition_check(replace(fits, time="1-00"), there), "wrong", 'time: "12:00:00" at most')
    has(partition_check(replace(fits, time="9:00"), there), "note", '"9:00" is 9 minutes')
    there["gpu"] |= {"State": "DRAIN"}
    has(partition_check(fits, there), "wrong", "wait until it is up")
    assert partition_check(SITE, {"all": {"PartitionName": "all", "State": "UP", "Default": "YES"}}).ok


def test_nodes_are_available() -> None:
    nodes = [Node(4, "mixed"), Node(4, "down*")]
    assert nodes_check(replace(SITE, gpus_per_node=4), nodes).verdict == "ok"
    has(nodes_check(SITE, nodes), "note", "gpus_per_node: 4")
    has(nodes_check(SITE, nodes[1:]), "wrong", "sinfo -R")


def test_limits_of_the_user() -> None:
    ours = replace(SITE, submit_limit=200)
    assert submit_limit_check(ours, ["200", ""]).verdict == "ok"
    has(submit_limit_check(ours, ["200", "50"]), "wrong", "mine.yaml: submit_limit: 50")
    has(submit_limit_check(SITE, ["200"]), "wrong", "submit_limit: 200")
    assert submit_limit_check(SITE, [""]).verdict == "ok"


def test_runs_that_are_preempted_need_time_to_save() -> None:
    config = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
    partition = {"PreemptMode": "REQUEUE", "GraceTime": "60"}
    assert preemption_check(SITE, config, partition).verdict == "ok"
    has(preemption_check(SITE, config, partition | {"GraceTime": "0"}), "note", "GraceTime")
    patient = replace(SITE, run={"grace": 90.0})
    has(preemption_check(patient, config, partition), "note", "90 s (run.grace)")
    has(preemption_check(SITE, config, partition | {"PreemptMode": "CANCEL"}), "note", "launch again")
    has(preemption_check(SITE, config, partition | {"PreemptMode": "SUSPEND"}), "note", "suspended")
    assert preemption_check(SITE, {"PreemptType": "preempt/none"}, {}).verdict == "ok"
    told = preemption_check(SITE, config | {"PreemptParameters": "send_user_signal"}, partition)
    assert "signal USR2" in told.detail

    assert requeue_check(SITE, {"JobRequeue": "1", "KillWait": "30 sec"}).verdict == "ok"
    has(requeue_check(SITE, {"JobRequeue": "1", "KillWait": "10 sec"}), "note", "KillWait")
    never = replace(SITE, remove_flags=["requeue"])
    has(requeue_check(never, {"JobRequeue": "0", "KillWait": "30 sec"}), "wrong", "remove_flags")


def test_a_node_says_what_it_has(tmp_path: Path) -> None:
    shutil.copy(node_check.__file__, tmp_path)
    subprocess.run([sys.executable, "-P", "node_check.py"], cwd=tmp_path, check=True, timeout=60)
    found = json.loads((tmp_path / "answer-0.json").read_text())
    assert found["host"] == socket.gethostname()
    assert abs(found["time"] - time.time()) < 60
    assert software_check(found["versions"]).ok
    has(software_check(found["versions"] | {"torch": ""}), "wrong", "Python environment")

    image = Container(runtime="apptainer", image="/a.sif")
    other = found | {"versions": {"torch": "9.9", "msgspec": "0.19", "submitit": ""}}
    assert image_check(image, other).ok, "versions may differ, and the ranks need no submitit"
    has(
        image_check(image, other | {"versions": found["versions"] | {"torch": ""}}),
        "wrong",
        "container.python",
    )
    has(image_check(image, found | {"python": "3.10.9"}), "wrong", "newer")

    node = {"host": "n1", "interfaces": ["lo", "ib0"], "address": "10.0.0.1"}
    assert network_check(SITE, node).ok
    assert network_check(replace(SITE, network_interface="ib0"), node).ok
    has(network_check(replace(SITE, network_interface="eth9"), node), "wrong", "accepted: ib0")
    has(network_check(SITE, node | {"address": "127.0.1.1"}), "wrong", "network_interface: one of ib0")


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


@pytest.mark.timeout(150)
@pytest.mark.slow
def test_two_tasks_of_a_job_shake_hands(tmp_path: Path) -> None:
    shutil.copy(node_check.__file__, tmp_path)
    copy_code(tmp_path / "code")
    tasks = [
        subprocess.Popen(
            [sys.executable, "-P", "node_check.py"],
            cwd=tmp_path,
            env=dict(os.environ)
            | {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "GLOO_SOCKET_IFNAME": LOOPBACK},
        )
        for rank in range(2)
    ]
    assert [task.wait(timeout=100) for task in tasks] == [0, 0]
    found = json.loads((tmp_path / "handshake-0.json").read_text())
    assert found["gloo"] == ""
    assert found["gloo_rate"] > 0
    assert json.loads((tmp_path / "handshake-1.json").read_text()) == {}


@pytest.mark.timeout(150)
def test_a_task_whose_handshake_cannot_begin_says_why(tmp_path: Path) -> None:
    shutil.copy(node_check.__file__, tmp_path)
    broken = tmp_path / "code" / "0" / "stages"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libtorch.so: cannot open')")
    environment = dict(os.environ) | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    subprocess.run(
        [sys.executable, "-P", "node_check.py"], cwd=tmp_path, env=environment, check=True, timeout=100
    )
    found = json.loads((tmp_path / "handshake-1.json").read_text())
    assert found == {"problem": "ImportError: libtorch.so: cannot open"}


@pytest.mark.parametrize(
    ("load", "of_machine", "verdict"),
    [(0.2, 2, "ok"), (1.2, 2, "ok"), (2.0, 2, "note"), (12.0, 2, "note"), (12.0, 64, "ok"), (0.1, 1, "ok")],
)
def test_cores_that_others_use_are_not_ok(load: float, of_machine: int, verdict: str) -> None:
    check = cores_check(2, load=load, of_machine=of_machine)
    assert check.verdict == verdict
    assert (f"load average {load:.1f} on {of_machine} cores" in check.detail) == (verdict == "note")
