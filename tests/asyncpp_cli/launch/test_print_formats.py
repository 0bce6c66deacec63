"""`launch --print`: what other schedulers are told of the runs; nothing is claimed."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
from pathlib import Path

import pytest
import yaml
from support.command_line import asyncpp
from support.launches import sweep

from asyncpp_cli.launch.formats.described import job_name
from asyncpp_cli.runs.status import State

ONE_CELL = ["matrix={schedule: 2bw, optimizer: adamw, seed: [0, 1]}", "exclude=[]", "train.steps=2"]


def site(folder: Path, **changes: object) -> Path:
    """A profile whose pods mount the test's folder."""
    container = {"runtime": "kubernetes", "image": "registry.example/a:1", "mounts": [f"shared:{folder}"]}
    keys = {"description": "pods", "memory": "3G", "container": container} | changes
    file = folder / "kube.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in keys.items() if value is not None}))
    return file


def test_commands_of_the_runs_that_are_left_are_printed_and_nothing_is_claimed(tmp_path: Path) -> None:
    experiment = sweep(tmp_path / "a b;'c", *ONE_CELL)
    first, second = experiment.runs
    assert asyncpp("train", first.folder, "--replay").code == 0
    text = asyncpp("launch", experiment.folder, "--print", "commands").output
    comment, command = text.splitlines()
    assert comment.startswith(f"# {second.id}: 1 node, 2 tasks")
    assert shlex.split(command)[-4:] == ["-m", "asyncpp_cli", "train", str(second.folder)]
    profile = site(tmp_path, tasks_per_node=1, container=None)
    [row] = json.loads(asyncpp("launch", experiment.folder, "--print", "json", "--site", profile).output)
    assert (row["shape"]["nodes"], row["shape"]["tasks"], row["memory"]) == (2, 2, "3G")
    assert [f"--node-rank {node}" in line for node, line in enumerate(row["node_commands"])] == [True, True]
    assert second.status().state == State.PENDING
    assert not second.attempts.exists()


def test_jobs_hold_to_the_published_schemas_of_kubernetes(tmp_path: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    experiment = sweep(tmp_path / "a $(b): 'c", *ONE_CELL)
    changes = {"gpus_per_node": 8, "environment": {"A": "no", "B": "- {x: 1}\n#"}}
    profile = site(tmp_path, **changes)
    ended = asyncpp("launch", experiment.folder, "--site", profile, "--retries", "1", "--print", "kubernetes")
    assert ended.code == 0, ended.errors
    jobs = list(yaml.safe_load_all(ended.output))
    assert len({job["metadata"]["name"] for job in jobs}) == len(jobs) == 2
    for job, run in zip(jobs, experiment.runs, strict=True):
        for version in ("1.31", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(job, version, strict=True)
        spec = job["spec"]
        assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (2, 2, 2)
        [container] = spec["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == {"cpu": "1", "nvidia.com/gpu": "1", "memory": "1536Mi"}
        assert container["command"][-1].replace("$$", "$") == str(run.folder)
        assert {"name": "B", "value": "- {x: 1}\n#"} in container["env"]
        ignored = spec["podFailurePolicy"]["rules"][0]
        assert ignored == {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [75]}}


def test_a_task_of_skypilot_names_its_machines_and_is_started_again(tmp_path: Path) -> None:
    experiment = sweep(tmp_path / "a;b", *ONE_CELL)
    changes = {"gpus_per_node": 8, "gpu_type": "H100", "cpus_per_task": 4, "environment": {"A": 1}}
    profile = site(tmp_path, **changes, setup=["module load x"])
    ended = asyncpp("launch", experiment.folder, "--site", profile, "--retries", "1", "--print", "skypilot")
    assert ended.code == 0, ended.errors
    tasks = list(yaml.safe_load_all(ended.output))
    assert len({task["name"] for task in tasks}) == 2
    for task, run in zip(tasks, experiment.runs, strict=True):
        assert task["num_nodes"] == 1
        assert task["resources"] == {
            "cpus": "8+",
            "memory": "4+",  # 3 GiB are 3.2 GB
            "accelerators": "H100:2",
            "image_id": "docker:registry.example/a:1",
            "job_recovery": {"max_restarts_on_errors": 1, "recover_on_exit_codes": [75]},
        }
        assert task["volumes"] == {str(tmp_path): "shared"}
        assert task["envs"] == {"PYTHONUNBUFFERED": "1", "A": "1"}
        setup, command = task["run"].splitlines()
        assert (setup, shlex.split(command)[-1]) == ("module load x", str(run.folder))
    profile = site(tmp_path, **changes | {"gpu_type": None})
    refused = asyncpp("launch", experiment.folder, "--site", profile, "--print", "skypilot")
    assert (refused.code, refused.errors.count("\n")) == (2, 1)
    assert "gpu_type: --print skypilot needs the name of the GPUs" in refused.errors


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_the_nodes_of_a_task_of_skypilot_train_its_run(tmp_path: Path) -> None:
    experiment = sweep(tmp_path / "a b", *ONE_CELL)
    profile = site(tmp_path, tasks_per_node=1, container=None)
    printed = asyncpp("launch", experiment.folder, "--site", profile, "--print", "skypilot").output
    task, run = next(yaml.safe_load_all(printed)), experiment.runs[0]
    assert task["num_nodes"] == 2
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environment = os.environ | task["envs"] | {"PET_MASTER_PORT": port}
    environment["SKYPILOT_NODE_IPS"] = "127.0.0.1\n127.0.0.2"
    nodes = [
        subprocess.Popen(["bash", "-c", task["run"]], env=environment | {"SKYPILOT_NODE_RANK": str(node)})
        for node in range(2)
    ]
    try:
        assert [node.wait(timeout=400) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
    assert run.status().state == State.COMPLETED


@pytest.mark.parametrize("run_id", ["2bw", "-", "a_b.c" * 40, "Ünicode"])
def test_a_jobs_name_is_a_dns_label(run_id: str) -> None:
    name = job_name(run_id, "/shared/x")
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?", name)
    assert name != job_name(run_id, "/shared/y")


def test_what_pods_need_and_lack_is_refused_in_one_line(tmp_path: Path) -> None:
    experiment = sweep(tmp_path / "e", *ONE_CELL)

    def refused(*arguments: str | Path) -> str:
        ended = asyncpp("launch", experiment.folder, *arguments)
        assert (ended.code, ended.output, ended.errors.count("\n")) == (2, "", 1)
        return ended.errors

    assert "accepted: commands, json, kubernetes, skypilot" in refused("--print", "helm")
    assert "--print takes only" in refused("--print", "json", "--wait")
    assert "needs an image and a volume" in refused("--print", "kubernetes")
    assert "--print kubernetes" in refused("--site", site(tmp_path))
    elsewhere = {"runtime": "kubernetes", "image": "a:1", "mounts": ["shared:/elsewhere"]}
    profile = site(tmp_path, container=elsewhere)
    assert "none holds" in refused("--site", profile, "--print", "kubernetes")
    profile = site(tmp_path, container=elsewhere | {"mounts": ["No Claim:/x"]})
    assert "PersistentVolumeClaim" in refused("--site", profile, "--print", "kubernetes")
