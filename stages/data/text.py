"""Plain text as bytes, one token per byte, split into train and validation.

The split is cached in the user's cache folder, and checked whenever it is opened:

    bytes-<key>/train.bin, validation.bin   the splits
    bytes-<key>/manifest.json               their statistics and checksums; carries its own checksum
    bytes-<key>/checked.json                sizes and times of the files when their checksums were checked
    bytes-<key>.lock                        held by the process that creates the folder

A folder that does not match its manifest is created again.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import itertools
import os
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.config.run_config import DataConfig
from stages.data.integrity import (
    CHECKSUM_KEY,
    identifies,
    read_checksummed,
    sync_folder,
    write_checksummed,
)
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
        DataError: the path does not exist or holds no text, or a file cannot be read.
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


def files_left_out(root: Path) -> list[str]:
    """Names of the files of a folder of text that hold something else, such as compressed text."""
    files = sorted(
        path for path in root.rglob("*") if path.is_file() and not is_hidden(path.relative_to(root))
    )
    return [file.name for file in _described(root, files) if file.size and not _was_text(file)]


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
    """Whether a file begins like text.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            start = file.read(1024)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error
    return bool(start) and b"\0" not in start


@lru_cache(maxsize=1 << 14)
def _was_text(file: TextFile) -> bool:
    """`is_text`, read once per process: a command opens the same text several times."""
    return is_text(file.path)


def _described(root: Path, files: Sequence[Path]) -> Iterator[TextFile]:
    """The files that are there: a link may lead nowhere."""
    folder = os.path.join(root, "")  # noqa: PTH118 (a path drops the last separator)
    for path in files:
        with suppress(FileNotFoundError):
            stat = path.stat()
            yield TextFile(path, str(path).removeprefix(folder), stat.st_size, stat.st_mtime_ns)


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
    # Too little of the text is in files that fit: hold out its end.
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
    """Names of the files to hold out: as many as fit into the share, in order of their names' hashes; none if
    these are less than half of it.

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
    return chosen if 2 * budget <= share * sum(sizes.values()) else set()


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


FORMAT = 3
MANIFEST, CHECKED = "manifest.json", "checked.json"


@dataclass(frozen=True, kw_only=True)
class Text:
    """Text split for training, and its statistics."""

    folder: Path
    """Contains a file of bytes for each split."""
    train_tokens: int
    validation_tokens: int
    bytes_per_token: float
    unigram_bits_per_byte: float
    sha256: str
    """Hash of both splits."""

    def file(self, split: str) -> Path:
        return self.folder / f"{split}.bin"


def prepare_text(config: DataConfig, *, cache: Path | None, spare: Path | None = None) -> Text:
    """The configured text, from the cache or newly split.

    Args:
        config: path of the text, and share to hold out.
        cache: the user's cache folder, if there is one.
        spare: folder to use if the cache cannot be written; None: a temporary one of this process.

    Raises:
        DataError: there is no text, or no folder to split it into.
    """
    root, files = text_files(config)
    name = f"bytes-{_key(config.validation_share, root, files)}"
    problem: OSError | None = None
    for place in (cache, spare):
        if place is None:
            continue
        try:
            return _open_or_create(place / name, files, share=config.validation_share)
        except OSError as error:
            problem = problem or error
    if spare is None:
        with suppress(OSError):
            folder = Path(_folder_of_this_process().name)
            return _open_or_create(folder / name, files, share=config.validation_share)
    why = "" if problem is None else f" ({problem.filename or cache}: {problem.strerror})"
    raise DataError(f"there is no folder to split the text of {root} into{why}; set ASYNCPP_CACHE to one")


@functools.cache
def _folder_of_this_process() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="asyncpp-text-")


def _key(share: float, root: Path, files: Sequence[TextFile]) -> str:
    digest = hashlib.sha256(f"{FORMAT}:{share}:{root.resolve()}".encode(errors="surrogateescape"))
    for file in files:
        known = f"{file.name}:{file.size}:{file.modified}"
        digest.update(known.encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def _open_or_create(folder: Path, files: Sequence[TextFile], *, share: float) -> Text:
    """The text in a folder, which is created if it is missing or damaged.

    Raises:
        OSError: it cannot be created.
    """
    if (text := _open_valid(folder)) is not None:
        return text
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock")):
        # Another rank may have created it meanwhile.
        if (text := _open_valid(folder)) is None:
            _create(folder, files, share=share)
            text = _open_valid(folder)
    if text is None:
        raise OSError(None, "what was written there does not read back", str(folder))
    return text


def _open_valid(folder: Path) -> Text | None:
    """The text in a folder; None if it does not match its manifest."""
    manifest = read_checksummed(folder / MANIFEST)
    if manifest is None or manifest.get("format") != FORMAT:
        return None
    digests: dict[str, str] = manifest.pop("files")
    text = Text(
        folder=folder,
        **{key: value for key, value in manifest.items() if key not in ("format", CHECKSUM_KEY)},
    )
    try:
        marks = {split: _mark(text.file(split)) for split in SPLITS}
        if [marks[split][0] for split in SPLITS] != [text.train_tokens, text.validation_tokens]:
            return None
        if (checked := read_checksummed(folder / CHECKED)) is not None and checked.get("marks") == marks:
            return text
        if any(_sha256(text.file(split)) != digests[split] for split in SPLITS):
            return None
    except OSError:
        return None
    if all(identifies(modified / 1e9) for _, modified in marks.values()):
        with suppress(OSError):
            write_checksummed(folder / CHECKED, {"marks": marks})
    return text


def _mark(file: Path) -> list[int]:
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("a") as opened:
        # Without locks (some network filesystems) the last one wins; all of them write the same.
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def _create(folder: Path, files: Sequence[TextFile], *, share: float) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as beside:
        unfinished = Path(beside) / "new"
        unfinished.mkdir()
        write_checksummed(unfinished / MANIFEST, _write(unfinished, files, share=share))
        sync_folder(unfinished)
        if folder.exists() or folder.is_symlink():
            folder.rename(Path(beside) / "damaged")
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        sync_folder(folder.parent)


def _write(folder: Path, files: Sequence[TextFile], *, share: float) -> dict[str, Any]:
    """Write both splits and read them back; returns the manifest."""
    import numpy as np

    digests = {split: hashlib.sha256() for split in SPLITS}
    opened = {split: (folder / f"{split}.bin").open("wb") for split in SPLITS}
    try:
        for split, block in split_text(files, share=share):
            opened[split].write(block)
            digests[split].update(block)
        for file in opened.values():
            file.flush()
            os.fsync(file.fileno())
    finally:
        for file in opened.values():
            file.close()
    both = hashlib.sha256()
    counts = {split: np.zeros(256, dtype=np.int64) for split in SPLITS}
    for split in SPLITS:
        with (folder / f"{split}.bin").open("rb") as written:
            while block := written.read(BLOCK):
                both.update(block)
                counts[split] += byte_counts(block)
    text = Text(
        folder=folder,
        train_tokens=int(counts["train"].sum()),
        validation_tokens=int(counts["validation"].sum()),
        bytes_per_token=1.0,
        unigram_bits_per_byte=entropy(counts["validation"]),
        sha256=both.hexdigest(),
    )
    known = {name: value for name, value in asdict(text).items() if name != "folder"}
    return {"format": FORMAT, **known, "files": {split: digests[split].hexdigest() for split in SPLITS}}
