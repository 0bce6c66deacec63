"""The files of a run's checkpoints: a folder per checkpoint, with a manifest of its files. Imports no torch.

    checkpoints/step-K/              the state after K steps
    checkpoints/step-K/manifest.json size and SHA-256 of every other file in it
    checkpoints/.writing-step-K/     incomplete: being written, or left by a run that was killed

A checkpoint is renamed from its incomplete name when all of it is on the disk, so readers see all of it or
nothing. A file that is damaged later does not match the manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

FORMAT = 1
"""Format of manifest.json and state.json; a reader refuses another."""
MANIFEST = "manifest.json"
STATE = "state.json"
DESCRIPTION = ".metadata"
"""torch.distributed.checkpoint's description of the tensors."""
MOST_BYTES_OF_TEXT = 1 << 28
"""Maximal size of a checkpoint's file that is read as a whole; at 4,096 ranks one has some ten million
bytes."""
_NAME = re.compile(r"step-([0-9]{1,18})")
_UNFINISHED = ".writing-"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or its content does not fit this run."""


class LostCheckpointError(CheckpointError):
    """A run that continues another has no valid checkpoint to start from."""


def folder_of(checkpoints: Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    return checkpoints / f"step-{step}"


def unfinished_folder(checkpoints: Path, step: int) -> Path:
    """Folder of a checkpoint while it is being written."""
    return checkpoints / f"{_UNFINISHED}step-{step}"


def saved_steps(checkpoints: Path) -> list[int]:
    """Steps that have checkpoints, newest first; their validity is not checked."""
    try:
        names = [entry.name for entry in checkpoints.iterdir()]
    except FileNotFoundError:
        return []
    matches = [match for name in names if (match := _NAME.fullmatch(name)) is not None]
    return sorted((int(match[1]) for match in matches), reverse=True)


def open_file(file: Path) -> BufferedReader:
    """Open a file of a checkpoint for reading.

    Raises:
        OSError: it cannot be opened, or is not a regular file (a link, device, pipe or folder).
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "it is no file", str(file))
    return os.fdopen(descriptor, "rb")


def read_whole(file: Path) -> bytes:
    """The content of a checkpoint's file that holds no tensors.

    Raises:
        OSError: see `open_file`; or the file is larger than MOST_BYTES_OF_TEXT.
    """
    with open_file(file) as opened:
        content = opened.read(MOST_BYTES_OF_TEXT + 1)
    if len(content) > MOST_BYTES_OF_TEXT:
        raise OSError(0, f"it has more than {MOST_BYTES_OF_TEXT} bytes", str(file))
    return content


def digest(file: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    with open_file(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        return {"bytes": size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of each file of a checkpoint, by name.

    Raises:
        CheckpointError: the manifest is missing or damaged, or lists a file that no checkpoint has.
    """
    if folder.is_symlink():
        raise CheckpointError("it is a link")
    content = _read_json(folder / MANIFEST)
    if (content.get("format"), f"step-{content.get('step')}") != (FORMAT, folder.name):
        raise CheckpointError(f"{MANIFEST} is of another form or another step")
    files = content.get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"{MANIFEST} lists no files")
    for missing in {STATE, DESCRIPTION} - files.keys():
        raise CheckpointError(f"{MANIFEST} does not list {missing}")
    for name, entry in files.items():
        if not _is_plain_name(name) or name == MANIFEST:
            raise CheckpointError(f"{MANIFEST} lists {_shown(name)}, which is no file of a checkpoint")
        if not isinstance(entry, dict):
            raise CheckpointError(f"{MANIFEST} says nothing of {name}")
    return files


def _is_plain_name(name: str) -> bool:
    """Whether this is a file name without a path."""
    return Path(name).name == name and name not in ("", ".", "..") and "\0" not in name


def _shown(name: object) -> str:
    return ascii(name)[:80]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_whole(file))
    except FileNotFoundError:
        raise CheckpointError(f"{file.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{file.name} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.name} cannot be read ({str(error)[:200]})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file.name} holds no JSON object")
    return content


def damage(folder: Path, files: Iterable[tuple[str, Mapping[str, Any]]]) -> str | None:
    """Describe the first damaged file of a checkpoint; None if all match their manifest entries."""
    for name, expected in files:
        try:
            actual = digest(folder / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if actual["bytes"] != expected.get("bytes"):
            return f"{name} has {actual['bytes']} bytes instead of {_shown(expected.get('bytes'))}"
        if actual["sha256"] != expected.get("sha256"):
            return f"{name} has changed since it was written (its SHA-256 differs)"
    return None


def begin(checkpoints: Path, step: int) -> None:
    """Create the folder that the checkpoint is written into, and remove incomplete checkpoints."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    remove_unfinished(checkpoints)
    unfinished_folder(checkpoints, step).mkdir()


def remove_unfinished(checkpoints: Path) -> None:
    """Remove incomplete checkpoints."""
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
    """Complete a checkpoint whose tensors are written: rename it, and remove the oldest beyond `keep`.

    Args:
        checkpoints: the run's folder of checkpoints.
        step: of this checkpoint.
        state: content of state.json.
        files: size and SHA-256 of every file written so far.
        keep: number of checkpoints to keep, including this one.

    Raises:
        OSError: a file could not be written; then nothing is removed.
    """
    unfinished, finished = unfinished_folder(checkpoints, step), folder_of(checkpoints, step)
    _write(unfinished / STATE, {"format": FORMAT, "step": step, **state})
    entries = {**files, STATE: digest(unfinished / STATE)}
    _write(unfinished / MANIFEST, {"format": FORMAT, "step": step, "files": entries})
    _sync_folder(unfinished)
    if finished.exists():
        # A damaged checkpoint of the same step, which an earlier attempt did not use.
        finished.rename(checkpoints / f"{_UNFINISHED}old-step-{step}")
    unfinished.rename(finished)
    _sync_folder(checkpoints)
    for old in saved_steps(checkpoints)[keep:]:
        # Renamed first, so that a partly removed folder does not look like a checkpoint.
        folder_of(checkpoints, old).rename(checkpoints / f"{_UNFINISHED}old-step-{old}")
    remove_unfinished(checkpoints)


def read_state(folder: Path) -> dict[str, Any]:
    """The content of state.json.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    content = _read_json(folder / STATE)
    if (content.get("format"), f"step-{content.get('step')}") != (FORMAT, folder.name):
        raise CheckpointError(f"{STATE} is of another form or another step")
    seconds, versions, stages = (content.get(key) for key in ("seconds", "versions", "stages"))
    if type(seconds) not in (int, float) or not 0 <= seconds < 1e15:  # type: ignore[operator]
        raise CheckpointError(f"{STATE}: seconds is {_shown(seconds)}, accepted: 0 or more")
    if (
        not isinstance(versions, list)
        or not versions
        or any(type(version) is not int for version in versions)
    ):
        raise CheckpointError(f"{STATE}: versions is {_shown(versions)}, accepted: a list of numbers")
    if not isinstance(stages, list) or not all(map(_is_stage, stages)):
        raise CheckpointError(f"{STATE}: stages is not a list of what stages keep beside tensors")
    return content


def _is_stage(stage: object) -> bool:
    """Whether it has the form of the record of `stages.checkpoint.state.pack`."""
    if not isinstance(stage, dict) or not {"parameters", "optimizer", "correction"} <= stage.keys():
        return False
    names, optimizer = stage["parameters"], stage["optimizer"]
    return (
        isinstance(names, list)
        and all(isinstance(name, str) for name in names)
        and isinstance(optimizer, dict)
        and all(isinstance(kept, dict) for kept in optimizer.values())
        and _is_correction(stage["correction"])
    )


def _is_correction(part: object) -> bool:
    if not isinstance(part, dict) or len(part) != 1:
        return False
    [(kind, content)] = part.items()
    if kind == "parts":
        return isinstance(content, dict) and all(map(_is_correction, content.values()))
    return kind == "value" or (kind == "tensors" and isinstance(content, bool))


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
