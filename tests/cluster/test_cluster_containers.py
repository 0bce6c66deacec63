"""Ranks that a program of the site profile starts, such as one that runs them in an image."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from support.cluster_runs import ONE_RUN, launch, site_file, starts, sweep

from asyncpp_cli.doctor.job import job_checks
from asyncpp_cli.runs.status import State
from asyncpp_cli.sites.profile import find_site

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
