"""What the tests of the cluster do again and again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncpp_cli.cluster.attempts import Attempt
from asyncpp_cli.runs import Experiment, Run, open_experiment

TINY = [
    "model=micro",
    "data.context=16",
    "train.microbatch_size=1",
    "train.eval_microbatches=1",
    "train.eval_interval=500",
    "site.timeout=40",
]
ONE_RUN = ["matrix={schedule: 2bw, optimizer: muon}", "exclude=[]", "error_feedback=true"]
SITE = """
partition: main
tasks_per_node: 1
memory: 900M
time: "60"
signal_lead: 45
network_interface: lo
retries: 1
"""


def asyncpp(
    *arguments: str | Path, seconds: float = 120, root: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end.

    Args:
        arguments: of the command.
        seconds: that it may take.
        root: of the checkout whose code is used; without: this one's.
    """
    command = [sys.executable, "-P", "-m", "asyncpp_cli", *map(str, arguments)]
    environment = dict(os.environ)
    if root is not None:
        environment["PYTHONPATH"] = str(root)
    return subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, check=False, env=environment
    )


def sweep(folder: Path, *changes: str) -> Experiment:
    """The quickstart's matrix with tiny runs, changed."""
    made = asyncpp("sweep", "quickstart", *TINY, *changes, "--out", folder)
    assert made.returncode == 0, made.stderr
    return open_experiment(folder)


def launch(folder: Path, *arguments: str, site: Path, root: Path | None = None) -> str:
    """Submit what is missing. What was said."""
    done = asyncpp("launch", folder, "--site", site, *arguments, root=root, seconds=280)
    assert done.returncode == 0, done.stderr
    return done.stderr


def site_file(folder: Path, **changes: Any) -> Path:
    """A profile of the test cluster, changed."""
    file = folder / "site.yaml"
    lines = [line for line in SITE.strip().splitlines() if line.partition(":")[0] not in changes]
    file.write_text("\n".join([*lines, *(f"{key}: {json.dumps(value)}" for key, value in changes.items())]))
    return file


def wait_for(condition: Callable[[], object], *, seconds: float, why: Callable[[], object] = str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {seconds:g} s: {why()}"
        time.sleep(0.1)


def status_of(folder: Path) -> list[dict[str, Any]]:
    """What `asyncpp status --json` says."""
    asked = asyncpp("status", folder, "--json")
    assert asked.returncode == 0, asked.stderr
    found: list[dict[str, Any]] = json.loads(asked.stdout)
    return found


def outcomes(run: Run) -> list[tuple[str, str]]:
    """State and cause of each attempt that is over."""
    read = [Attempt(run, number).read("outcome") for number in range(1, run.status().attempt + 1)]
    return [(outcome["state"], outcome["cause"]) for outcome in read if outcome is not None]


def starts(run: Run) -> list[tuple[int, int]]:
    """Attempt, and the step after which it went on."""
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    return [(row["attempt"], row["step"]) for row in lines if row["kind"] == "start"]


def weights(run: Run) -> str:
    return str(run.metrics()[-1]["weights_sha256"])
