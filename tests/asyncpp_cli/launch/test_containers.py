"""A program before the ranks' command, such as one that starts an image: the words of srun's command."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from support.cluster_runs import ONE_RUN, sweep

from asyncpp_cli.launch.cluster import show_scripts
from asyncpp_cli.launch.common.options import LaunchOptions
from asyncpp_cli.launch.common.srun_command import python_words
from asyncpp_cli.sites.profile import read_site

WORK = Path("/exp/submissions/1")
ENVIRONMENT = {"PYTHONPATH": "../../code/c0de:/own", "NCCL_SOCKET_IFNAME": "ib0", "HOME": "/home/me"}


def test_the_variables_of_the_job_replace_those_of_an_image() -> None:
    def words(folder: Path) -> list[str]:
        return python_words("run 'a b.sif'", "/opt/bin/python", folder=folder, environment=ENVIRONMENT)

    head = ["run", "a b.sif", "env", "-u", "PYTHONHOME"]
    tail = ["NCCL_SOCKET_IFNAME=ib0", "PYTHONNOUSERSITE=1", "/opt/bin/python"]
    assert words(WORK) == [*head, "PYTHONPATH=/exp/code/c0de:/own", *tail]
    # Python would split an absolute path at its colon.
    assert words(Path("/a:b/submissions/1")) == [*head, "PYTHONPATH=../../code/c0de:/own", *tail]


def test_a_dry_run_shows_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without SLURM
    experiment = sweep(tmp_path / "a b", *ONE_RUN)
    site = tmp_path / "mine.yaml"
    site.write_text(
        "gpus_per_node: 2\nsrun_flags: [--mpi=none]\nnetwork_interface: ib0\npython: python3\n"
        "command_prefix: apptainer exec --nv '/images/$(touch x).sif'\n"
    )
    show_scripts(experiment, read_site(site, name="mine"), LaunchOptions())
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("srun ")]
    command = shlex.split(line)
    started = command[command.index("--mpi=none") + 1 :]
    assert started[:5] == ["apptainer", "exec", "--nv", "/images/$(touch x).sif", "env"]
    assert "GLOO_SOCKET_IFNAME=ib0" in command
    assert any(word.startswith(f"PYTHONPATH={experiment.folder}/code/") for word in command)
    tail = ["-P", "-m", "asyncpp_cli.launch.common.supervisor", str(experiment.runs[0].folder), "1"]
    assert command[-6:] == ["python3", *tail]
