"""Plain text as bytes, one token per byte, split into train and validation.

The split is cached in the user's cache folder (`stages.data.text_cache`).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from stages.config.run_config import DataConfig
from stages.data.shards import DataError

if TYPE_CHECKING:
    import numpy as np

SPLITS = ("train", "validation")
BLOCK = 1 << 20
"""Bytes read at once."""


@dataclass(frozen=True)
class TextFile:
    """A text file, with the size and time it had when it was described."""

    path: Path
    name: str
    """Path relative to the folder of the text."""
    size: int
    modified: int
    """Modification time, nanoseconds."""


def text_files(config: DataConfig) -> tuple[Path, list[TextFile]]:
    """The folder that names are relative to, and its text files, sorted by name.

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
                path for path in root.rglob("*") if path.is_file() and not is_hidden(path.relative_to(root))
            ]
        else:
            raise DataError(
                f"{config.path} does not exist; a text file, a folder of text files, token shards or "
                "prepared data are accepted"
            )
    # Skips empty and binary files (a zero byte near the start).
    texts = [file for file in _described(root, sorted(files)) if _was_text(file)]
    if not texts:
        raise DataError(
            f"{config.path or root} holds no text; a text file or a folder of text files is accepted"
        )
    return root, texts


def _library_text(root: Path) -> list[Path]:
    # Tests and tables of character codes are another kind of text; site-packages differ between machines.
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


def is_hidden(relative: Path) -> bool:
    """Whether a path has a part that begins with a dot."""
    return any(part.startswith(".") for part in relative.parts)


def is_text(path: Path) -> bool:
    """Whether a file is readable and begins like text."""
    try:
        with path.open("rb") as file:
            start = file.read(1024)
    except OSError:
        return False
    return bool(start) and b"\0" not in start


@lru_cache(maxsize=1 << 14)
def _was_text(file: TextFile) -> bool:
    """`is_text`, read once per process: a command opens the same text several times."""
    return is_text(file.path)


def _described(root: Path, files: Sequence[Path]) -> Iterator[TextFile]:
    """The files that are there: a link may lead nowhere."""
    for path in files:
        with suppress(FileNotFoundError):
            stat = path.stat()
            yield TextFile(path, str(path.relative_to(root)), stat.st_size, stat.st_mtime_ns)


def split_text(files: Sequence[TextFile], *, share: float) -> Iterator[tuple[str, bytes]]:
    """Blocks of the files' text, each with its split; a newline separates the files of a split.

    Raises:
        DataError: a file cannot be read, or has changed since it was described.
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
    # No file is small enough to be held out as a whole: hold out the end of the text.
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
    """Names of the files to hold out: as many as fit into the share, in order of their names' hashes.

    Args:
        sizes: bytes of each file by name.
        share: of all bytes, 0 .. 1.
    """
    budget = share * sum(sizes.values())
    chosen = set()
    for name in sorted(sizes, key=_name_hash):
        if sizes[name] <= budget:
            chosen.add(name)
            budget -= sizes[name]
    return chosen


def _name_hash(name: str) -> bytes:
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def byte_counts(text: bytes) -> np.ndarray:
    """Number of occurrences of each byte value, `(256,)`."""
    import numpy as np

    return np.bincount(np.frombuffer(text, dtype=np.uint8), minlength=256)


def entropy(counts: np.ndarray) -> float:
    """Entropy in bits of the distribution given by counts; 0 if there are none."""
    import numpy as np

    share = counts[counts > 0] / max(1, counts.sum())
    return float(-(share * np.log2(share)).sum())
