"""Ranks in a container on a cluster: a run needs nothing but what is mounted."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from support.cluster_runs import ONE_RUN, launch, set_partition, site_file, starts, sweep
from support.command_line import asyncpp, succeeded
from support.launches import weights

from asyncpp_cli.doctor.job import job_checks
from asyncpp_cli.runs.status import State
from asyncpp_cli.sites.profile import find_site

SYSTEM = ("/usr", "/bin", "/lib", "/lib64")
NEEDS_APPTAINER = pytest.mark.skipif(shutil.which("apptainer") is None, reason="apptainer is not installed")
ISOLATED = {
    # Without what apptainer mounts by itself: a test's folder may be below /tmp or the home folder.
    "APPTAINER_NO_MOUNT": "tmp,home,cwd",
    # As an ordinary user runs it, also where the test runs as root.
    "APPTAINER_USERNS": "1",
}
STAND_IN = """#!/bin/sh
# Writes its arguments down, and runs the command on the host.
printf '%s\\n' "$@" > {words}
while [ "$1" != env ]; do shift; done
exec "$@"
"""


def stand_in(folder: Path) -> tuple[Path, Path]:
    """The folder of a program `apptainer`, and the file of the words that reach it."""
    programs, words = folder / "bin", folder / "words"
    programs.mkdir()
    program = programs / "apptainer"
    program.write_text(STAND_IN.format(words=words))
    program.chmod(0o755)
    return programs, words


@NEEDS_APPTAINER
def test_a_job_runs_in_an_image_of_apptainer(slurm_conf: Path, tmp_path: Path) -> None:
    """Two nodes; the image is an empty folder, and Python with its packages is mounted by the profile."""
    image = tmp_path / "image"
    python = {sys.prefix, sys.base_prefix, *(path for path in sys.path if path.endswith("site-packages"))}
    mounts = [*SYSTEM, *sorted(path for path in python if not path.startswith("/usr/"))]
    for folder in (*mounts, "/etc", "/proc", "/sys", "/dev", "/tmp", "/var/tmp", "/root"):
        (image / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
    container = {"runtime": "apptainer", "image": str(image), "python": sys.executable}
    changes = [*ONE_RUN, "train.steps=3"]
    here, there = sweep(tmp_path / "here", *changes), sweep(tmp_path / "a b;$(touch x)", *changes)
    site = site_file(
        tmp_path,
        environment=ISOLATED,
        container=container | {"mounts": [f"{path}:{path}:ro" for path in mounts]},
    )
    launch(there.folder, "--wait", site=site)
    succeeded("train", here.runs[0].folder, "--replay")
    [run] = there.runs
    assert run.status().state == State.COMPLETED, run.status().reason
    assert weights(run) == weights(here.runs[0])
    assert not (tmp_path / "x").exists()


def test_srun_starts_the_ranks_through_apptainer(slurm_conf: Path, tmp_path: Path) -> None:
    """The words that reach it. This `apptainer` is a stand-in that isolates nothing: no test of mounts."""
    programs, words = stand_in(tmp_path)
    experiment = sweep(tmp_path / "e", *ONE_RUN, "train.steps=2")
    container = {"runtime": "apptainer", "image": "/a b.sif", "python": sys.executable}
    path = f"{programs}:{os.environ['PATH']}"
    site = site_file(tmp_path, environment={"PATH": path}, container=container)
    launch(experiment.folder, "--replay", "--wait", site=site)
    [run] = experiment.runs
    assert (run.status().state, starts(run)) == (State.COMPLETED, [(1, 0)]), run.status().reason
    [submission] = (file.parent for file in experiment.submissions.glob("*/submission.json"))
    recorded = words.read_text().splitlines()
    folder = experiment.folder
    pwd = ["exec", "--pwd", str(submission)]
    assert recorded[:6] == [*pwd, "--bind", f"{folder}:{folder}:rw", "/a b.sif"]
    assert recorded[-2:] == [str(run.folder), "1"]


def test_doctor_starts_its_ranks_in_the_container(slurm_conf: Path, tmp_path: Path) -> None:
    programs, words = stand_in(tmp_path)
    container = {"runtime": "apptainer", "image": "/a b.sif", "python": sys.executable}
    path = f"{programs}:{os.environ['PATH']}"
    site = site_file(tmp_path, environment={"PATH": path}, container=container)
    folder = tmp_path / "e"
    folder.mkdir()
    checks = {check.check: check for check in job_checks(find_site(str(site)), folder)}
    assert {name for name, check in checks.items() if not check.ok} == set(), checks
    assert checks["software of the image"].detail.endswith("in /a b.sif")
    assert "exchanged tensors (gloo, " in checks["two nodes"].detail
    made = words.read_text().splitlines()[2]
    assert Path(made).parent == folder
    assert f"{made}:{made}:rw" in words.read_text().splitlines()
    assert list(folder.iterdir()) == []


def test_a_job_whose_image_has_changed_refuses_to_run(slurm_conf: Path, tmp_path: Path) -> None:
    image = tmp_path / "a.sif"
    image.write_text("before")
    experiment = sweep(tmp_path / "e", *ONE_RUN, "train.steps=2")
    site = site_file(tmp_path, container={"runtime": "apptainer", "image": str(image)})
    set_partition("down")
    launch(experiment.folder, site=site)
    image.write_text("afterwards")
    set_partition("up")
    launch_again = asyncpp("launch", experiment.folder, "--site", site, "--wait")
    [run] = experiment.runs
    assert launch_again.code == 1
    assert f"{image} has changed since it was submitted" in run.status().reason
