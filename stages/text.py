"""Text as it lies on disk, read as bytes: one token a byte, split into train and validation.

The split is made once and kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from stages.config import DataConfig
from stages.shards import DataError

FORMAT = 1
SPLITS = ("train", "validation")


@dataclass(frozen=True, kw_only=True)
class Text:
    """Text prepared for training, and what is known of it."""

    folder: Path
    """Holds a file of bytes for each split."""
    train_tokens: int
    validation_tokens: int
    bytes_per_token: float
    unigram_bits_per_byte: float
    sha256: str
    """Of both splits."""

    def file(self, split: str) -> Path:
        return self.folder / f"{split}.bin"


def prepare_text(config: DataConfig, *, cache: Path) -> Text:
    """The text that the configuration names, from the cache or newly split.

    Raises:
        DataError: there is no text.
    """
    root, files = text_files(config)
    folder = cache / _key(config, root, files)
    manifest = folder / "manifest.json"
    if not manifest.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Several ranks may prepare at once: each writes a folder of its own, and the first to move it in
        # place wins.
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            _write(unfinished, root, files, share=config.validation_share)
            unfinished.rename(folder)
        except OSError:
            if not manifest.exists():
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    known = json.loads(manifest.read_text())
    return Text(folder=folder, **{name: value for name, value in known.items() if name != "format"})


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


def _key(config: DataConfig, root: Path, files: Sequence[Path]) -> str:
    digest = hashlib.sha256(f"{FORMAT}:{config.validation_share}:{root.resolve()}".encode())
    for path in files:
        known = path.stat()
        digest.update(f"{path.relative_to(root)}:{known.st_size}:{known.st_mtime_ns}".encode())
    return f"bytes-{digest.hexdigest()[:16]}"


def _write(folder: Path, root: Path, files: Sequence[Path], *, share: float) -> None:
    held_out = validation_files(
        {str(path.relative_to(root)): path.stat().st_size for path in files}, share=share
    )
    parts: dict[str, list[bytes]] = {split: [] for split in SPLITS}
    for path in files:
        split = "validation" if str(path.relative_to(root)) in held_out else "train"
        parts[split].append(path.read_bytes())
    texts = {split: b"\n".join(parts[split]) for split in SPLITS}
    if not texts["validation"]:
        # Too few files to hold a whole one out: the end of the text is held out.
        cut = len(texts["train"]) - round(len(texts["train"]) * share)
        texts = {"train": texts["train"][:cut], "validation": texts["train"][cut:]}
    digest = hashlib.sha256()
    for split in SPLITS:
        (folder / f"{split}.bin").write_bytes(texts[split])
        digest.update(texts[split])
    prepared = Text(
        folder=folder,
        train_tokens=len(texts["train"]),
        validation_tokens=len(texts["validation"]),
        bytes_per_token=1.0,
        unigram_bits_per_byte=entropy(byte_counts(texts["validation"])),
        sha256=digest.hexdigest(),
    )
    known = {name: value for name, value in asdict(prepared).items() if name != "folder"}
    (folder / "manifest.json").write_text(json.dumps({"format": FORMAT, **known}))


def validation_files(sizes: dict[str, int], *, share: float) -> set[str]:
    """Names of the files to hold out: as many as fit, in the order of their names' hashes.

    Args:
        sizes: bytes of each file by name.
        share: of all bytes.
    """
    budget = share * sum(sizes.values())
    chosen = set()
    for name in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if sizes[name] <= budget:
            chosen.add(name)
            budget -= sizes[name]
    return chosen


def byte_counts(text: bytes) -> np.ndarray:
    """How often each byte occurs: `(256,)`."""
    return np.bincount(np.frombuffer(text, dtype=np.uint8), minlength=256)


def entropy(counts: np.ndarray) -> float:
    """Bits that one draw from these counts carries; 0 where there are none."""
    share = counts[counts > 0] / max(1, counts.sum())
    return float(-(share * np.log2(share)).sum())
