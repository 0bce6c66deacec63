"""Launches on several machines that share one folder; each is a namespace with a host name of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.launches import sweep, wait_for

from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State

APART = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]


@pytest.mark.timeout(1500)
@pytest.mark.slow
def test_three_machines_share_runs_and_one_that_vanishes_gives_its_own_back(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a second host name needs root and unshare(1)")
    seconds = [f"site.{key}=30" for key in ("timeout", "start_timeout", "save_timeout")]
    matrix = f"matrix={{schedule: 1f1b, optimizer: adamw, seed: {list(range(20))}}}"
    runs = sweep(tmp_path / "e", matrix, "exclude=[]", "train.steps=20", "site.device=cpu", *seconds).runs
    assert len(runs) == 20
    launch = [sys.executable, "-P", "-m", "asyncpp_cli", "launch", str(tmp_path / "e")]
    launch += ["--replay", "--max-parallel", "1"]
    with (tmp_path / "output").open("w") as output:
        machines = [
            subprocess.Popen(
                [*APART, 'hostname "$0" && exec "$@"', f"machine-{number}", *launch],
                stdout=output,
                stderr=output,
            )
            for number in range(3)
        ]
        try:
            wait_for(lambda: bool(running(runs, "machine-0")), seconds=250)
            machines[0].kill()
            machines[0].wait(timeout=250)
            lost = running(runs, "machine-0")
            assert [machine.wait(timeout=1000) for machine in machines[1:]] == [0, 0]
        finally:
            for machine in machines:
                machine.kill()
                machine.wait(timeout=250)
    for run in runs:
        assert run.status().state == State.COMPLETED, (tmp_path / "output").read_text()
        assert run.status().attempt == (2 if run.id in lost else 1)


def running(runs: tuple[Run, ...], host: str) -> set[str]:
    """Ids of the runs that a machine is running, by their files."""
    statuses = {run.id: run.status() for run in runs}
    return {
        run_id for run_id, status in statuses.items() if (status.state, status.host) == (State.RUNNING, host)
    }
