"""What a run measured, as a trace."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from support.command_line import refusal, succeeded
from support.launches import sweep
from support.rows import plain

from asyncpp_cli.report.load.measured_timeline import read_measured_timeline
from asyncpp_cli.runs.run_folder import Run


def trace_of(run: Run) -> list[dict[str, Any]]:
    ended = succeeded("schedule", "export", run.folder, "--format", "trace")
    events: list[dict[str, Any]] = json.loads(ended.output)["traceEvents"]
    return events


@pytest.mark.slow
def test_a_run_is_a_trace_of_its_last_steps_and_of_its_memory(tmp_path: Path) -> None:
    # Two segments: the first ends with the evaluation after step 4.
    matrix = "matrix={schedule: 2bw, optimizer: adamw}"
    experiment = sweep(tmp_path / "x", matrix, "exclude=[]", "train.steps=7", "train.eval_interval=4")
    run = Run(next((experiment.folder / "runs").iterdir()))
    assert "no timeline was measured yet" in refusal("schedule", "export", run.folder, "--format", "trace")
    succeeded("launch", experiment.folder)

    events = trace_of(run)
    spans = [event for event in events if event["ph"] == "X"]
    measured = read_measured_timeline(run)
    for rank, actions in enumerate(measured.actions):
        of_rank = [event for event in spans if event["tid"] == rank]
        assert [event["name"] for event in of_rank] == [str(action) for action in actions]
        assert all(event["dur"] >= 0 for event in of_rank)

    segments = [row for row in plain(run) if row["kind"] == "segment"]
    assert [row["first_step"] for row in segments] == [0, 4]
    first_end, last_end = (row["seconds"] * 1e6 for row in segments)
    assert all(first_end <= event["ts"] for event in spans)

    counters = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            counters[event["name"]].append((event["ts"], event["args"]))
    assert set(counters) == {"rank 0: memory, bytes", "rank 1: memory, bytes"}
    for rank in range(2):
        held = counters[f"rank {rank}: memory, bytes"]
        assert [at for at, _ in held] == [0, first_end, first_end, last_end]
        for row, (_, kinds) in zip(segments, held[1::2], strict=True):
            assert sum(kinds.values()) == row["memory"]["total"][rank]


def test_a_run_takes_no_geometry_and_no_other_format(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("{}")
    assert "is a run: leave out --stages" in refusal(
        "schedule", "export", folder, "--format", "trace", "--stages", "2"
    )
    assert "a run is exported with --format trace" in refusal("schedule", "export", folder)
