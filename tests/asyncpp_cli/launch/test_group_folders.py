"""A group folder with the setgid bit: others may read what one user makes there, and write by the umask."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launches import ONE, TINY
from support.privileges import User

from asyncpp_cli.runs.experiment_folder import open_experiment

SHORT = [*TINY, *ONE, "train.steps=2"]
ANNA, BERT, LAB = 54331, 54332, 54400


@pytest.fixture
def lab() -> Iterator[Path]:
    """`mkdir lab; chgrp lab lab; chmod 2770 lab`, where every user may enter."""
    with tempfile.TemporaryDirectory(prefix="asyncpp-lab-") as outer:
        Path(outer).chmod(0o755)
        folder = Path(outer) / "lab"
        folder.mkdir()
        if os.geteuid() == 0:
            os.chown(folder, -1, LAB)
        folder.chmod(0o2770)
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o027, 0o002])
def test_a_second_user_of_the_group_reads_and_goes_on_as_the_umask_lets(lab: Path, umask: int) -> None:
    anna, bert = (User(user, group=LAB, umask=umask, home=lab.parent / str(user)) for user in (ANNA, BERT))
    if not anna.permitted():
        pytest.skip("not permitted here: acting as other users")
    experiment, longer, exported = lab / "e", lab / "longer", lab / "exported"
    for words in (
        ("sweep", "quickstart", *SHORT, "matrix.seed=[0]", "--out", experiment),
        ("launch", experiment),
        ("extend", experiment, "--steps", "4", "--out", longer),
    ):
        ended = anna.run(*words)
        assert ended.code == 0, ended.errors
    [run] = open_experiment(experiment).runs
    assert anna.run("export", run.folder, "--out", exported).code == 0
    check_shared(lab, group_writes=umask == 0o002)

    for folder in (experiment, longer):
        assert "2bw-adamw" in bert.run("status", folder).output
    assert "completed" in bert.run("status", experiment).output
    report = bert.run("report", experiment)
    assert (report.code, "completed" in report.output) == (0, True), report.errors

    more = bert.run("sweep", "quickstart", *SHORT, "matrix.seed=[0,1]", "--out", experiment)
    launched = bert.run("launch", longer, "--replay")
    if umask == 0o027:
        assert (more.code, launched.code) == (2, 1)
        for errors in (more.errors, launched.errors):
            assert "Permission denied" in errors
            assert "Traceback" not in errors
        return
    assert (more.code, launched.code) == (0, 0), more.errors + launched.errors
    # Her folders, his runs; and hers again.
    assert bert.run("launch", experiment, "--replay").code == 0
    check_shared(lab, group_writes=True)
    assert "longer: 1 completed" in anna.run("status", longer).output
    _, his = open_experiment(experiment).runs
    assert anna.run("logs", his.folder).code == 0


def check_shared(lab: Path, *, group_writes: bool) -> None:
    """Check that all in the folder belongs to the group, which has the rights that the umask leaves it."""
    rights = stat.S_IRGRP | (stat.S_IWGRP if group_writes else 0)
    for path in lab.rglob("*"):
        status = path.lstat()
        assert status.st_gid == LAB, path
        if path.is_dir():
            assert stat.S_IMODE(status.st_mode) & 0o2070 == 0o2000 | rights | stat.S_IXGRP, path
        elif path.name != "secret":  # of an attempt's processes, by design
            assert stat.S_IMODE(status.st_mode) & 0o060 == rights, path
