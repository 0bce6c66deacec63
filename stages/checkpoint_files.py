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
import stat
from collections.abc import Iterable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

FORMAT = 1
"""Of manifest.json and state.json; a reader refuses another."""
MANIFEST = "manifest.json"
STATE = "state.json"
DESCRIPTION = ".metadata"
"""What torch.distributed.checkpoint writes of the tensors."""
MOST_BYTES_OF_TEXT = 1 << 28
"""Of a file of a checkpoint that is read as a whole; that of 4,096 ranks takes some ten million."""
_NAME = re.compile(r"step-([0-9]{1,18})")
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


def open_file(file: Path) -> BufferedReader:
    """A file of a checkpoint, to be read.

    Raises:
        OSError: it cannot be opened, or is a link, a device, a queue or a folder: reading these may have no
            end, or may lead elsewhere.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "it is no file", str(file))
    return os.fdopen(descriptor, "rb")


def read_whole(file: Path) -> bytes:
    """The content of a file of a checkpoint that is no tensors.

    Raises:
        OSError: as `open_file`, or it is larger than any such file is.
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
    """By each file of a checkpoint its size and SHA-256.

    Raises:
        CheckpointError: there is no manifest, or it is damaged, or lists what no checkpoint has.
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
    """Whether it is the name of a file, and no path to another folder."""
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
    """What is wrong with the first damaged one of `files` of a checkpoint, as its manifest has them."""
    for name, promised in files:
        try:
            found = digest(folder / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found["bytes"] != promised.get("bytes"):
            return f"{name} has {found['bytes']} bytes instead of {_shown(promised.get('bytes'))}"
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
    """The content of state.json.

    Raises:
        CheckpointError: it is not what a checkpoint has.
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
    """Whether it has the form of what `stages.stage_state.pack` gives beside the tensors."""
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
