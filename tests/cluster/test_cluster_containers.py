"""Ranks in an image on a cluster: a run needs nothing but what is mounted."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from support.cluster_runs import ONE_RUN, launch, site_file, starts, sweep
from support.command_line import succeeded
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
    changes = [*ONE_RUN, "train.steps=3"]
    here, there = sweep(tmp_path / "here", *changes), sweep(tmp_path / "a b;$(touch x)", *changes)
    binds = [word for path in mounts for word in ("--bind", f"{path}:{path}:ro")]
    binds += ["--bind", str(there.folder), "--pwd", str(there.folder)]
    prefix = shlex.join(["apptainer", "exec", *binds, str(image)])
    site = site_file(tmp_path, environment=ISOLATED, command_prefix=prefix, python=sys.executable)
    launch(there.folder, "--wait", site=site)
    succeeded("train", here.runs[0].folder, "--replay")
    [run] = there.runs
    assert run.status().state == State.COMPLETED, run.status().reason
    assert weights(run) == weights(here.runs[0])
    assert not (tmp_path / "x").exists()


def test_srun_starts_the_ranks_through_the_prefix(slurm_conf: Path, tmp_path: Path) -> None:
    """The words that reach it. This `apptainer` is a stand-in that isolates nothing: no test of mounts."""
    programs, words = stand_in(tmp_path)
    experiment = sweep(tmp_path / "e", *ONE_RUN, "train.steps=2")
    path = f"{programs}:{os.environ['PATH']}"
    image = {"command_prefix": "apptainer exec --nv '/a b.sif'", "python": sys.executable}
    site = site_file(tmp_path, environment={"PATH": path}, **image)
    launch(experiment.folder, "--replay", "--wait", site=site)
    [run] = experiment.runs
    assert (run.status().state, starts(run)) == (State.COMPLETED, [(1, 0)]), run.status().reason
    recorded = words.read_text().splitlines()
    assert recorded[:4] == ["exec", "--nv", "/a b.sif", "env"]
    assert recorded[-2:] == [str(run.folder), "1"]
    folder = tmp_path / "d"
    folder.mkdir()
    checks = {check.check: check for check in job_checks(find_site(str(site)), folder)}
    assert {name for name, check in checks.items() if not check.ok} == set(), checks
    assert "exchanged tensors (gloo, " in checks["two nodes"].detail
    assert words.read_text().splitlines()[-1].endswith("node_check.py")
    assert list(folder.iterdir()) == []
