"""The files of a run's checkpoints: a folder per checkpoint, with an index and a manifest. Imports no torch.

    checkpoints/step-K/                     the state after K steps
    checkpoints/step-K/rank-R.safetensors   the tensors that rank R wrote
    checkpoints/step-K/index.json           whose it is, where each tensor is, and all state but tensors
    checkpoints/step-K/manifest.json        size and SHA-256 of every other file in it
    checkpoints/.writing-step-K/            incomplete: being written, or left by a run that was killed

A checkpoint is renamed from its incomplete name when all of it is on the disk, so readers see all of it or
nothing. A file that is damaged later does not match the manifest.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from msgspec import Meta

from stages.config.records import Count, DamagedError, Record, decoded, encoded, open_file, read_bytes

FORMAT = 2
"""Format of a checkpoint; a reader refuses another."""
MANIFEST = "manifest.json"
INDEX = "index.json"
MOST_BYTES_OF_TEXT = 1 << 28
"""Maximal size of a checkpoint's file that is read as a whole; at 4,096 ranks one has some ten million
bytes."""
_NAME = re.compile(r"step-([0-9]{1,18})")
_UNFINISHED = ".writing-"

Scalar = bool | int | float | str | None
Dtype = Literal[
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"
]
"""Types of the tensors that weights, optimizers and corrections have, by torch's names."""


class FileEntry(Record, frozen=True, kw_only=True):
    """A file in the manifest."""

    bytes: Count
    sha256: str


class Manifest(Record, frozen=True, kw_only=True):
    """Content of manifest.json."""

    format: int
    step: Count
    files: dict[str, FileEntry]


class Owner(Record, frozen=True, kw_only=True):
    """The run that a checkpoint belongs to."""

    run: str
    """Its id."""
    config_sha256: str
    """Hash of its configuration."""

    def __str__(self) -> str:
        return f"run {self.run} (configuration {self.config_sha256[:8]})"


class SavedTensor(Record, frozen=True, kw_only=True):
    """Where a tensor is, and its form."""

    file: str
    dtype: Dtype
    shape: Annotated[list[Count], Meta(max_length=64)]


class Parts(Record, frozen=True, kw_only=True, tag=True):
    """A mapping in a correction's state."""

    parts: dict[str, Parts | Value | PerParameter]


class Value(Record, frozen=True, kw_only=True, tag=True):
    """A scalar in a correction's state."""

    value: Scalar


class PerParameter(Record, frozen=True, kw_only=True, tag=True):
    """One tensor for each parameter in a correction's state; none while `present` is false."""

    present: bool


CorrectionState = Parts | Value | PerParameter


class StageRecord(Record, frozen=True, kw_only=True):
    """The state of a stage, or of a data rank's share of it, beside tensors."""

    parameters: list[str]
    """Names of the parameters that it updates."""
    updates: Count
    """Steps that its optimizer has taken."""
    optimizer: dict[str, dict[str, Scalar]]
    """Scalars of the optimizer's state, by parameter and key."""
    correction: CorrectionState


class Index(Record, frozen=True, kw_only=True):
    """Content of index.json."""

    format: int
    step: Count
    owner: Owner | None
    """None: it was saved by a caller of `stages.trainer` that named no run."""
    torch: str
    """Version that wrote it."""
    seconds: Annotated[float, Meta(ge=0, lt=1e15)]
    """Training time so far."""
    versions: Annotated[list[int], Meta(min_length=1)]
    """Weight versions that the next segment starts with."""
    rows: FileEntry | None = None
    """Size and SHA-256 of the run's metrics when it was begun: it comes after these rows."""
    tensors: dict[str, SavedTensor]
    stages: list[StageRecord]


class _Rows(Record, frozen=True, kw_only=True):
    format: int
    step: Count
    owner: Owner | None
    rows: FileEntry | None = None


class _Head(Record, frozen=True):
    format: int


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or its content does not fit this run."""


class FormatError(CheckpointError):
    """A checkpoint is of another format."""


class LostCheckpointError(CheckpointError):
    """A run has checkpoints, or continues another, but none that it can start from."""


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


def digest(file: Path) -> FileEntry:
    """Size in bytes and SHA-256 of a file.

    Raises:
        CheckpointError: it is missing, cannot be opened, or is not a regular file.
    """
    with _naming(file), open_file(file, follow_links=False) as opened:
        size = os.fstat(opened.fileno()).st_size
        return FileEntry(bytes=size, sha256=hashlib.file_digest(opened, "sha256").hexdigest())


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """Size and SHA-256 of each file of a checkpoint, by name.

    Raises:
        FormatError: the checkpoint is of another format.
        CheckpointError: the manifest is missing or damaged, or lists a file that no checkpoint has.
    """
    if folder.is_symlink():
        raise CheckpointError("it is a link")
    files = _read(folder / MANIFEST, Manifest).files
    if INDEX not in files:
        raise CheckpointError(f"{MANIFEST} does not list {INDEX}")
    for name in files:
        if not _is_plain_name(name) or name == MANIFEST:
            raise CheckpointError(f"{MANIFEST} lists {_shown(name)}, which is no file of a checkpoint")
    return files


def read_index(folder: Path) -> Index:
    """Content of index.json.

    Raises:
        FormatError: the checkpoint is of another format.
        CheckpointError: it is missing or damaged, or contradicts itself or the manifest.
    """
    index, files = _read(folder / INDEX, Index), read_manifest(folder)
    for key, tensor in index.tensors.items():
        if tensor.file not in files or tensor.file == INDEX:
            raise CheckpointError(f"{INDEX}: {_shown(key)} is in {_shown(tensor.file)}, not in {MANIFEST}")
    for name in (name for stage in index.stages for name in stage.parameters):
        for key in (f"master/{name}", *(f"version/{version}/{name}" for version in index.versions)):
            if key not in index.tensors:
                raise CheckpointError(f"{INDEX} lacks the tensor {_shown(key)}")
    for stage in index.stages:
        if stage.updates and not _is_started(stage.correction):
            raise CheckpointError(f"{INDEX} lacks tensors of the correction after {stage.updates} updates")
    return index


def _is_started(state: CorrectionState) -> bool:
    """Whether a correction's state has all of its tensors, as it has from the first update on."""
    match state:
        case Parts():
            return all(map(_is_started, state.parts.values()))
        case PerParameter():
            return state.present
    return True


def rows_before(folder: Path, *, run: str) -> FileEntry | None:
    """Size and SHA-256 of the metrics that a checkpoint comes after in the run with this id: of nothing if it
    is another run's, from which this one begins; None if they are unknown.

    Raises:
        CheckpointError: its index is missing or damaged.
    """
    found = _read(folder / INDEX, _Rows)
    if found.owner is not None and found.owner.run != run:
        return FileEntry(bytes=0, sha256=hashlib.sha256().hexdigest())
    return found.rows


def check_owner(index: Index, owners: Sequence[Owner]) -> Owner | None:
    """The run that a checkpoint belongs to, one of these.

    Raises:
        CheckpointError: it is another's.
    """
    if owners and index.owner not in owners:
        actual = "no known run" if index.owner is None else str(index.owner)
        raise CheckpointError(f"it belongs to {actual}, this is {owners[0]}")
    return index.owner


def _is_plain_name(name: str) -> bool:
    """Whether this is a file name without a path."""
    return Path(name).name == name and name not in ("", ".", "..") and "\0" not in name


def _shown(name: object) -> str:
    return ascii(name)[:80]


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Within this context, what is wrong with a file is said of the checkpoint, by the file's name."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{file.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{file.name} cannot be read ({error.strerror})") from error
    except DamagedError as error:
        raise CheckpointError(str(error).removeprefix(f"{file.parent}/")) from error


_Content = TypeVar("_Content", Manifest, Index, _Rows)


def _read(file: Path, kind: type[_Content]) -> _Content:
    with _naming(file):
        text = read_bytes(file, most=MOST_BYTES_OF_TEXT, follow_links=False)
        head = decoded(text, _Head, where=file.name, newest_format=sys.maxsize) if kind is Manifest else None
        if head is not None and head.format != FORMAT:
            raise FormatError(
                f"it has format {head.format}, this asyncpp reads checkpoints of format {FORMAT}"
            )
        content = decoded(text, kind, where=file.name, newest_format=FORMAT)
    if (content.format, f"step-{content.step}") != (FORMAT, file.parent.name):
        raise CheckpointError(f"{file.name} is of another format or another step")
    return content


def damage(folder: Path, files: Iterable[tuple[str, FileEntry]]) -> str | None:
    """Describe the first damaged file of a checkpoint; None if all match their manifest entries."""
    for name, expected in files:
        try:
            actual = digest(folder / name)
        except CheckpointError as error:
            return str(error)
        if actual.bytes != expected.bytes:
            return f"{name} has {actual.bytes} bytes instead of {expected.bytes}"
        if actual.sha256 != expected.sha256:
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


def commit(checkpoints: Path, index: Index, files: Mapping[str, FileEntry], *, keep: int) -> None:
    """Complete a checkpoint whose tensors are written: rename it, and remove the oldest beyond `keep`.

    Args:
        checkpoints: the run's folder of checkpoints.
        index: of this checkpoint.
        files: size and SHA-256 of every file written so far.
        keep: number of checkpoints to keep, including this one.

    Raises:
        OSError: a file could not be written; then nothing is removed.
    """
    step = index.step
    unfinished, finished = unfinished_folder(checkpoints, step), folder_of(checkpoints, step)
    _write(unfinished / INDEX, index)
    entries = {**files, INDEX: digest(unfinished / INDEX)}
    _write(unfinished / MANIFEST, Manifest(format=FORMAT, step=step, files=entries))
    _sync_folder(unfinished)
    if finished.exists():
        # A damaged checkpoint of the same step, which an earlier attempt did not use.
        finished.rename(checkpoints / f"{_UNFINISHED}old-step-{step}")
    unfinished.rename(finished)
    _sync_folder(checkpoints)
    # Later ones were not used: this attempt began before them.
    for old in [earlier for earlier in saved_steps(checkpoints) if earlier <= step][keep:]:
        # Renamed first, so that a partly removed folder does not look like a checkpoint.
        folder_of(checkpoints, old).rename(checkpoints / f"{_UNFINISHED}old-step-{old}")
    remove_unfinished(checkpoints)


def _write(file: Path, content: Record) -> None:
    with file.open("wb") as opened:
        opened.write(encoded(content))
        opened.flush()
        os.fsync(opened.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
