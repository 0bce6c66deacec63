"""The folder of a run's checkpoints: one folder a checkpoint, with a manifest of its files. Imports no torch.

    checkpoints/step-K/              the state after K steps
    checkpoints/step-K/manifest.json size and SHA-256 of every other file in it
    checkpoints/.writing-step-K/     being written, or left by a run that was killed while it wrote

A checkpoint is written under the second name and renamed when all of it is on the disk, so a reader sees all
of one or none; a file that was damaged later does not match the manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FORMAT = 1
"""Of manifest.json and state.json; a reader refuses another."""
MANIFEST = "manifest.json"
STATE = "state.json"
_NAME = re.compile(r"step-(\d+)")
_UNFINISHED = ".writing-"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or holds something else than this run needs."""


def folder_of(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return checkpoints / f"step-{step}"


def unfinished_folder(checkpoints: Path, step: int) -> Path:
    """Where it is while it is being written."""
    return checkpoints / f"{_UNFINISHED}step-{step}"


def saved_steps(checkpoints: Path) -> list[int]:
    """Steps of which there are checkpoints, newest first; whether they are valid is not looked at."""
    try:
        names = [entry.name for entry in checkpoints.iterdir()]
    except FileNotFoundError:
        return []
    found = [match for name in names if (match := _NAME.fullmatch(name)) is not None]
    return sorted((int(match[1]) for match in found), reverse=True)


def digest(file: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    with file.open("rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """By each file of a checkpoint its size and SHA-256.

    Raises:
        CheckpointError: there is no manifest, or it is damaged.
    """
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        if (content["format"], f"step-{content['step']}") != (FORMAT, folder.name):
            raise CheckpointError(f"{MANIFEST} is of another form or another step")
        return {str(name): dict(entry) for name, entry in content["files"].items()}
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be read ({error})") from error


def damage(folder: Path, files: Iterable[tuple[str, Mapping[str, Any]]]) -> str | None:
    """What is wrong with the first damaged one of `files` of a checkpoint, as its manifest has them."""
    for name, promised in files:
        try:
            found = digest(folder / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found["bytes"] != promised.get("bytes"):
            return f"{name} has {found['bytes']} bytes instead of {promised.get('bytes')}"
        if found["sha256"] != promised.get("sha256"):
            return f"{name} has changed since it was written (its SHA-256 differs)"
    return None


def begin(checkpoints: Path, step: int) -> None:
    """Make the folder that the checkpoint is written into, and remove what killed runs left."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    remove_unfinished(checkpoints)
    unfinished_folder(checkpoints, step).mkdir()


def remove_unfinished(checkpoints: Path) -> None:
    """Remove checkpoints that were never finished."""
    for leftover in checkpoints.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def commit(
    checkpoints: Path,
    step: int,
    *,
    state: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Any]],
    keep: int,
) -> None:
    """Finish a checkpoint whose tensors are written: it takes its name, and the oldest beyond `keep` go.

    Args:
        checkpoints: the run's folder of checkpoints.
        step: of this one.
        state: what becomes state.json.
        files: size and SHA-256 of every file that is there already.
        keep: how many checkpoints are kept, this one among them.

    Raises:
        OSError: something could not be written. Nothing is removed then.
    """
    unfinished, finished = unfinished_folder(checkpoints, step), folder_of(checkpoints, step)
    _write(unfinished / STATE, {"format": FORMAT, "step": step, **state})
    entries = {**files, STATE: digest(unfinished / STATE)}
    _write(unfinished / MANIFEST, {"format": FORMAT, "step": step, "files": entries})
    _sync_folder(unfinished)
    if finished.exists():
        # A damaged one of the same step, of which an earlier attempt had to go back.
        finished.rename(checkpoints / f"{_UNFINISHED}old-step-{step}")
    unfinished.rename(finished)
    _sync_folder(checkpoints)
    for old in saved_steps(checkpoints)[keep:]:
        # Renamed first: a folder that is removed in part must not look like a checkpoint.
        folder_of(checkpoints, old).rename(checkpoints / f"{_UNFINISHED}old-step-{old}")
    remove_unfinished(checkpoints)


def read_state(folder: Path) -> dict[str, Any]:
    """The content of state.json."""
    content: dict[str, Any] = json.loads((folder / STATE).read_bytes())
    return content


def _write(file: Path, content: Mapping[str, Any]) -> None:
    with file.open("w", encoding="utf-8") as opened:
        json.dump(content, opened)
        opened.write("\n")
        opened.flush()
        os.fsync(opened.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
