"""Containers for ranks: the words of the commands, what is mounted, and what a profile may say."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from support.cluster_runs import ONE_RUN, sweep
from support.command_line import refusal

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.launch.cluster import show_scripts
from asyncpp_cli.launch.common.arrays import plan_arrays
from asyncpp_cli.launch.common.options import LaunchOptions
from asyncpp_cli.sites.containers import (
    Container,
    ContainerError,
    container_words,
    image_state,
    mounts_of,
)
from asyncpp_cli.sites.profile import read_site
from stages.config.run_config import RunConfig, changed

WORK = Path("/exp/submissions/1")
ENVIRONMENT = {"PYTHONPATH": "../../code/c0de:/own", "NCCL_SOCKET_IFNAME": "ib0", "HOME": "/home/me"}
PYTHON = [
    *["env", "-u", "PYTHONHOME", "PYTHONPATH=../../code/c0de:/own", "NCCL_SOCKET_IFNAME=ib0"],
    *["PYTHONNOUSERSITE=1", "python3"],
]


def words(container: Container, *, gpus: bool = False) -> tuple[list[str], list[str]]:
    mounts = ["/exp:/exp:rw", "/data:/data:ro"]
    return container_words(container, mounts, work_folder=WORK, gpus=gpus, environment=ENVIRONMENT)


def test_pyxis_adds_flags_to_srun_and_starts_python_directly() -> None:
    flags, started = words(Container(runtime="pyxis", image="/images/a b.sqsh"))
    assert flags == [
        "--container-image=/images/a b.sqsh",
        "--container-mounts=/exp:/exp:rw,/data:/data:ro",
        "--container-workdir=/exp/submissions/1",
        "--no-container-entrypoint",
        "--no-container-remap-root",
    ]
    assert started == PYTHON


def test_apptainer_is_what_srun_starts_with_a_flag_for_gpus() -> None:
    container = Container(runtime="apptainer", image="/images/a b.sif")
    binds = ["--bind", "/exp:/exp:rw", "--bind", "/data:/data:ro"]
    for gpus, nv in ((False, []), (True, ["--nv"])):
        flags, started = words(container, gpus=gpus)
        assert flags == []
        head = ["apptainer", "exec", *nv, "--pwd", "/exp/submissions/1"]
        assert started == [*head, *binds, "/images/a b.sif", *PYTHON]


def test_the_interpreter_of_the_image_can_be_named() -> None:
    _, started = words(Container(runtime="pyxis", image="asyncpp:1", python="/opt/asyncpp/bin/python"))
    assert started[-1] == "/opt/asyncpp/bin/python"


def test_the_experiment_is_mounted_to_write_and_data_and_weights_to_read(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    file = tmp_path / "tokens" / "a.bin"
    file.touch()
    config = RunConfig()
    container = Container(runtime="pyxis", image="a")
    experiment = tmp_path / "e"
    assert mounts_of(container, experiment, config) == [f"{experiment}:{experiment}:rw"]
    config = changed(config, {"data.path": str(file), "model.init": "/weights"})
    # The index lies beside the file.
    tokens = file.parent
    assert mounts_of(container, experiment, config)[1:] == [f"{tokens}:{tokens}:ro", "/weights:/weights:ro"]


def test_what_a_mount_of_the_profile_holds_is_not_mounted_again() -> None:
    config = RunConfig()
    config = changed(config, {"data.path": "/scratch/data"})

    def mounts(*own: str) -> list[str]:
        return mounts_of(Container(runtime="pyxis", image="a", mounts=list(own)), Path("/scratch/e"), config)

    assert mounts("/scratch") == ["/scratch:/scratch:rw"]
    # The experiment is written to, and a folder elsewhere in the image is another one.
    assert mounts("/scratch:/scratch:ro") == ["/scratch:/scratch:ro", "/scratch/e:/scratch/e:rw"]
    assert mounts("/scratch:/other")[1:] == ["/scratch/e:/scratch/e:rw", "/scratch/data:/scratch/data:ro"]


@pytest.mark.parametrize("name", ["a:b", "a,b", 'a"b', "a\\b", "a\nb"])
def test_a_path_that_neither_runtime_can_mount_is_refused(name: str) -> None:
    container = Container(runtime="apptainer", image="/a.sif")
    with pytest.raises(ContainerError, match="cannot be mounted"):
        mounts_of(container, Path("/exp") / name, RunConfig())


def test_a_mistake_ends_a_launch_with_one_line(tmp_path: Path) -> None:
    site = tmp_path / "mine.yaml"
    site.write_text("container: {runtime: pyxis, image: a, mounts: [b]}\n")
    assert f"{site}: container.mounts: 'b'" in refusal("launch", tmp_path, "--site", site)


@pytest.mark.parametrize("image", ["nvcr.io#nvidia/pytorch:25.01-py3", "/shared/a.sqsh", "me@ubuntu"])
def test_images_of_pyxis(tmp_path: Path, image: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"container: {{runtime: pyxis, image: '{image}'}}\n")
    site = read_site(file, name="mine")
    assert site.container == Container(runtime="pyxis", image=image)


def test_a_changed_image_is_noticed(tmp_path: Path) -> None:
    image = tmp_path / "a.sif"
    container = Container(runtime="apptainer", image=str(image))
    assert image_state(container) == ""
    image.write_text("a")
    before = image_state(container)
    image.write_text("ab")
    assert before
    assert image_state(container) != before
    # A name in a registry is no file.
    assert image_state(Container(runtime="pyxis", image="ubuntu")) == ""


def test_a_dry_run_shows_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without SLURM
    experiment = sweep(tmp_path / "a b", *ONE_RUN)
    site = tmp_path / "mine.yaml"
    site.write_text(
        "gpus_per_node: 2\nsrun_flags: [--mpi=none]\nnetwork_interface: ib0\n"
        "container: {runtime: apptainer, image: '/images/$(touch x).sif', mounts: ['/scratch:/s:ro']}\n"
    )
    options = LaunchOptions()
    show_scripts(experiment, read_site(site, name="mine"), options)
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("srun ")]
    command = shlex.split(line)
    assert command[command.index("--mpi=none") + 1 :][:3] == ["apptainer", "exec", "--nv"]
    folder = experiment.folder
    binds = ["--bind", "/scratch:/s:ro", "--bind", f"{folder}:{folder}:rw"]
    first = command.index("--bind")
    assert command[first : first + 5] == [*binds, "/images/$(touch x).sif"]
    assert "GLOO_SOCKET_IFNAME=ib0" in command
    tail = ["-P", "-m", "asyncpp_cli.launch.common.supervisor", str(experiment.runs[0].folder), "1"]
    assert command[-6:] == ["python3", *tail]


def test_an_experiment_that_cannot_be_mounted_is_refused_before_anything_is_submitted(
    tmp_path: Path,
) -> None:
    experiment = sweep(tmp_path / "a,b", *ONE_RUN)
    file = tmp_path / "mine.yaml"
    file.write_text("container: {runtime: apptainer, image: /a.sif}\n")
    options = LaunchOptions()
    with pytest.raises(UserError) as refused:
        plan_arrays(experiment.runs, read_site(file, name="mine"), options, max_array_size=9)
    assert str(refused.value).startswith(f"{file}: container.mounts: ")
    assert "a,b" in str(refused.value)
