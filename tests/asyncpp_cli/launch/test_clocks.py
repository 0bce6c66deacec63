"""Wall clocks that are set while a run trains, and that differ between its ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launches import HOUR, HOURS, ONE, SetClock, StartLaunch, is_training, sweep, wait_for

from asyncpp_cli.runs.status import Cause, State

CLOCKS = {
    "forward and back": [(0.0, 0.0), (2 * HOUR, 0.0), (0.0, 0.0)],
    "back and forward": [(0.0, 0.0), (-2 * HOUR, 0.0), (0.0, 0.0)],
    "a rank that is ahead": [(0.0, HOUR)],
    "a rank that is behind": [(0.0, -HOUR)],
}
"""By how much the clocks are ahead, one after the other, and by how much more each rank's is."""


def output(*arguments: str | Path) -> str:
    """What a command prints in a process of its own, whose clock is set."""
    command = [sys.executable, "-P", "-m", "asyncpp_cli", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=250).stdout


@pytest.mark.timeout(1500)
@pytest.mark.slow
@pytest.mark.parametrize("clocks", CLOCKS.values(), ids=CLOCKS)
def test_a_run_goes_on_and_is_told_of_whatever_the_clocks_show(
    clocks: list[tuple[float, float]], set_clock: SetClock, tmp_path: Path, start_launch: StartLaunch
) -> None:
    (run,) = sweep(tmp_path / "e", *ONE, f"train.steps={HOURS}").runs
    set_clock(*clocks[0])
    began = time.monotonic()
    launched = start_launch(tmp_path / "e")
    wait_for(lambda: is_training(run), seconds=250)
    for clock in clocks:
        set_clock(*clock)
        before = run.status().step
        wait_for(lambda step=before: run.status().step > step, seconds=250)
        said = re.search(r" (-?[\d:]+) ago", output("status", tmp_path / "e"))
        assert said is not None
        minutes, seconds = map(int, said[1].split(":"))  # no hours, no minus
        assert 60 * minutes + seconds <= time.monotonic() - began
    set_clock(*clocks[-1])
    output("cancel", tmp_path / "e")
    assert launched.finish(seconds=250) == 1
    status = run.status()
    assert (status.state, status.cause) == (State.INTERRUPTED, Cause.CANCELLED)
    assert run.saved_step == status.step > 0
    (record,) = json.loads(output("status", tmp_path / "e", "--json"))
    assert 0 < record["seconds"] < time.monotonic() - began
    assert record["core_hours"] == pytest.approx(2 * record["seconds"] / HOUR)
