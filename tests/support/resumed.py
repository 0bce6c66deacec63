"""Checks that a run resumed from a checkpoint equals the uninterrupted run."""

from __future__ import annotations

import json
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.small_runs import replayed
from support.training_cases import measured

from stages.checkpoint import files
from stages.config.records import CHECKSUM, encoded
from stages.config.run_config import RunConfig


def saving(config: RunConfig, *, interval: int = 2, keep: int = 9) -> RunConfig:
    return replace(
        config,
        train=replace(config.train, checkpoint_interval=interval),
        site=replace(config.site, keep_checkpoints=keep),
    )


def go_back(folder: Path, step: int) -> None:
    """Remove the checkpoints after `step`, as if the run had been killed then."""
    for later in files.saved_steps(folder):
        if later > step:
            shutil.rmtree(files.folder_of(folder, later))


def after(rows: list[dict[str, Any]], *, step: int, updates: int) -> list[dict[str, Any]]:
    """The rows that a run resumed after `step` writes again, except its `start` row."""
    kept = []
    for row in rows:
        done = {
            "start": -1,
            "segment": row.get("first_step", 0) - step + 1,
            "step": row.get("step", 0) - updates,
            "eval": row.get("step", 0) - step,
            "end": 1,
        }
        if done[row["kind"]] > 0:
            kept.append(row)
    return kept


def check_resumed(whole: list[dict[str, Any]], resumed: list[dict[str, Any]], *, step: int) -> None:
    start, *rest = resumed
    assert (start["kind"], start["step"]) == ("start", step)
    assert rest == after(whole, step=step, updates=start["updates"])
    assert rest[-1]["weights_sha256"]


def replay_twice(config: RunConfig, folder: Path, *, step: int) -> None:
    """Run to the end, then again from the checkpoint of `step`; both give the same bits."""
    whole = replayed(config, checkpoints=folder)
    go_back(folder, step)
    resumed = replayed(config, checkpoints=folder)
    check_resumed(measured(whole), measured(resumed), step=step)


def wait_for_saving() -> None:
    """Wait until no checkpoint is written in the background."""
    deadline = time.monotonic() + 20
    while any(thread.name == "checkpoint" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def json_of(file: Path) -> Any:
    """The content of a checkpoint's JSON without its checksum, to be edited."""
    content = json.loads(file.read_bytes())
    del content[CHECKSUM]
    return content


def seal(folder: Path) -> None:
    """Make the manifest of a checkpoint agree with its files, as if they had been saved so."""
    manifest = json_of(folder / files.MANIFEST)
    manifest["files"] = {
        file.name: files.digest(file) for file in folder.iterdir() if file.name != files.MANIFEST
    }
    (folder / files.MANIFEST).write_bytes(encoded(manifest))
