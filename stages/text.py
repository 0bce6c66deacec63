"""Text as it lies on disk, read as bytes: one token a byte, split into train and validation.

The split is made once and kept in the user's cache folder (`stages.text_cache`).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stages.config import DataConfig
from stages.shards import DataError

SPLITS = ("train", "validation")
BLOCK = 1 << 20
"""Bytes read at once."""


def text_files(config: DataConfig) -> tuple[Path, list[Path]]:
    """The folder that names are relative to, and the files of text below it, sorted by name.

    Raises:
        DataError: the path does not exist or holds no text.
    """
    if config.path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = _library_text(root)
    else:
        root = Path(config.path).expanduser()
        if root.is_file():
            root, files = root.parent, [root]
        elif root.is_dir():
            files = [
                path for path in root.rglob("*") if path.is_file() and not _hidden(path.relative_to(root))
            ]
        else:
            raise DataError(
                f"{config.path} does not exist; a text file, a folder of text files, token shards or "
                "prepared data are accepted"
            )
    # Empty files and binary ones (a zero byte at the start) are no text.
    files = sorted(path for path in files if is_text(path))
    if not files:
        raise DataError(
            f"{config.path or root} holds no text; a text file or a folder of text files is accepted"
        )
    return root, files


def _library_text(root: Path) -> list[Path]:
    # Tests and tables of character codes are text of another kind; site-packages differ from machine to
    # machine.
    skipped = {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "__pycache__",
        "encodings",
        "lib2to3",
    }
    files = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in skipped]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return files


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def is_text(path: Path) -> bool:
    """Whether a file can be read and begins as text does."""
    try:
        with path.open("rb") as file:
            start = file.read(1024)
    except OSError:
        return False
    return bool(start) and b"\0" not in start


@dataclass(frozen=True)
class TextFile:
    """A file of text as it was when it was looked at."""

    path: Path
    name: str
    """Below the folder that the text is in."""
    size: int
    modified: int
    """Nanoseconds."""


def describe(root: Path, files: Sequence[Path]) -> list[TextFile]:
    """The files with their sizes and times.

    Raises:
        DataError: one is gone.
    """
    try:
        found = [(path, path.stat()) for path in files]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read ({error.strerror})") from error
    return [
        TextFile(path, str(path.relative_to(root)), stat.st_size, stat.st_mtime_ns) for path, stat in found
    ]


def split_text(files: Sequence[TextFile], *, share: float) -> Iterator[tuple[str, bytes]]:
    """The text of files, a line end between two of a split: pieces of it, each with its split.

    Raises:
        DataError: a file cannot be read, or is not what it was when it was described.
    """
    held_out = validation_files({file.name: file.size for file in files}, share=share)
    if held_out:
        begun: set[str] = set()
        for file in files:
            split = SPLITS[file.name in held_out]
            between = [b"\n"] if split in begun else []
            begun.add(split)
            yield from ((split, block) for block in itertools.chain(between, _blocks(file)))
        return
    # Too few files to hold a whole one out: the end of the text is held out.
    size = sum(file.size for file in files) + len(files) - 1
    left = size - round(size * share)
    for number, file in enumerate(files):
        for block in itertools.chain([b"\n"] if number else [], _blocks(file)):
            yield "train", block[:left]
            yield "validation", block[left:]
            left = max(0, left - len(block))


def _blocks(file: TextFile) -> Iterator[bytes]:
    read = 0
    try:
        with file.path.open("rb") as opened:
            while block := opened.read(BLOCK):
                read += len(block)
                yield block
    except OSError as error:
        raise DataError(f"{file.path} cannot be read ({error.strerror})") from error
    if read != file.size:
        raise DataError(f"{file.path} changes while it is read ({file.size} bytes, then {read})")


def validation_files(sizes: dict[str, int], *, share: float) -> set[str]:
    """Names of the files to hold out: as many as fit, in the order of their names' hashes.

    Args:
        sizes: bytes of each file by name.
        share: of all bytes.
    """
    budget = share * sum(sizes.values())
    chosen = set()
    for name in sorted(
        sizes, key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    ):
        if sizes[name] <= budget:
            chosen.add(name)
            budget -= sizes[name]
    return chosen


def _chance(name: str) -> bytes:
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def byte_counts(text: bytes) -> np.ndarray:
    """How often each byte occurs: `(256,)`."""
    return np.bincount(np.frombuffer(text, dtype=np.uint8), minlength=256)


def entropy(counts: np.ndarray) -> float:
    """Bits that one draw from these counts carries; 0 where there are none."""
    share = counts[counts > 0] / max(1, counts.sum())
    return float(-(share * np.log2(share)).sum())
