"""A real SLURM for the tests of this folder: the one that ASYNCPP_TEST_CLUSTER names, or one of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster_runs import set_partition, squeue

SCRIPT = Path(__file__).parent / "cluster"
RUNNING = "ASYNCPP_TEST_CLUSTER"
"""Names the folder of a cluster that `cluster start` has started."""


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Path]:
    """Folder of a running test cluster."""
    if RUNNING in os.environ:
        yield Path(os.environ[RUNNING])
        return
    # Not below pytest's folder: the paths of sockets are short.
    folder = Path(tempfile.mkdtemp(prefix="asyncpp-slurm-"))
    folder.chmod(0o755)  # tests act as other users, too
    started = subprocess.run(
        [SCRIPT, "start", folder], capture_output=True, text=True, timeout=500, check=False
    )
    try:
        if started.returncode != 0:
            pytest.skip(started.stderr.strip() or started.stdout.strip())
        yield folder
    finally:
        subprocess.run([SCRIPT, "stop", folder], timeout=120, check=False)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def slurm_conf(running_cluster: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """SLURM's commands speak to the test cluster; nothing of the test's jobs is left behind."""
    conf = running_cluster / "etc" / "slurm.conf"
    monkeypatch.setenv("SLURM_CONF", str(conf))
    yield conf
    monkeypatch.setenv("SLURM_CONF", str(conf))
    set_partition("up")
    for _ in range(600):
        # Again and again: a task that SLURM is starting meanwhile may miss it.
        subprocess.run(["scancel", "--user", str(os.getuid())], timeout=60, check=False)
        if not squeue():
            return
        subprocess.run(["sleep", "0.2"], check=True)
    raise AssertionError(f"jobs are left: {squeue()}")
