"""Finds input files, tells their kinds, and opens them."""

from __future__ import annotations

import bz2
import glob
import gzip
import lzma
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from asyncpp_cli.base.errors import UserError
from stages.data.text import is_hidden

COMPRESSIONS = (".gz", ".xz", ".bz2", ".zst")
KINDS = {".jsonl": "lines", ".ndjson": "lines", ".json": "lines", ".parquet": "parquet"}
"""Kind of a file by its suffix; other files are text."""
EXTRA = 'pip install ".[data]" in asyncpp\'s clone'


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file of documents."""

    file: Path
    name: str
    """Path as the user gave it, for messages and the manifest."""
    kind: str
    """`text`, `lines` (one JSON object per line) or `parquet`."""
    compression: str
    """A suffix of `COMPRESSIONS`, or empty."""
    size: int
    """Bytes on disk."""


def find_sources(inputs: Sequence[str]) -> list[Source]:
    """The files that the inputs name, in order; those of a folder or pattern are sorted by name.

    Args:
        inputs: files, folders (read recursively) and shell patterns, with `**`.

    Raises:
        UserError: an input does not exist or holds nothing readable, or a file is named twice.
    """
    sources = [source for name in inputs for source in _of_input(name)]
    seen: dict[Path, str] = {}
    for source in sources:
        path = source.file.resolve()
        if path in seen:
            raise UserError(f"{source.name} is named twice ({seen[path]})")
        seen[path] = source.name
    return sources


def _of_input(name: str) -> Iterator[Source]:
    if not name:
        raise UserError("an INPUT is empty; accepted: a file, a folder ('.': this one) or a pattern")
    path = Path(name).expanduser()
    if path.is_file():
        source = _source(path, name)
        if source.size == 0:
            raise UserError(f"{name} is empty")
        if _is_binary(source):
            raise UserError(f"{name} is not text: it has a zero byte (UTF-16? convert it with iconv)")
        yield source
        return
    if path.is_dir():
        candidates = [file for file in path.rglob("*") if not is_hidden(file.relative_to(path))]
    elif any(character in name for character in "*?["):
        # Path.glob knows no hidden files, and fails for "**.txt".
        candidates = [Path(found) for found in glob.iglob(str(path), recursive=True)]  # noqa: PTH207
    else:
        raise UserError(
            f"{name} does not exist; a file, a folder or a pattern such as 'texts/*.jsonl' is accepted"
        )
    files = sorted(file for file in candidates if file.is_file())
    names = {file: str(file.relative_to(path)) if path.is_dir() else str(file) for file in files}
    sources = [source for file in files if _readable(source := _source(file, names[file]))]
    if not sources:
        raise UserError(f"{name} holds no text, JSON lines or Parquet")
    yield from sources


def _source(file: Path, name: str) -> Source:
    compression = file.suffix.lower() if file.suffix.lower() in COMPRESSIONS else ""
    plain = file.with_suffix("") if compression else file
    kind = KINDS.get(plain.suffix.lower(), "text")
    return Source(file=file, name=name, kind=kind, compression=compression, size=file.stat().st_size)


def _readable(source: Source) -> bool:
    """Whether to read a file found in a folder or by a pattern: no binary files, no empty ones."""
    return source.size > 0 and not _is_binary(source)


def _is_binary(source: Source) -> bool:
    """Whether what should be text has a zero byte near its start; UTF-16 is refused when it is read."""
    if source.kind != "text" or source.compression:
        return False
    try:
        with source.file.open("rb") as file:
            start = file.read(1024)
    except OSError:  # said when it is read
        return False
    return b"\0" in start and not begins_as_utf16(start)


def begins_as_utf16(content: bytes) -> bool:
    """Whether it begins with the byte order mark of UTF-16, as files of Windows do."""
    return content.startswith((BOM_UTF16_LE, BOM_UTF16_BE))


@contextmanager
def opened(source: Source) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file: its unpacked text, and the raw file, whose position shows the progress.

    Raises:
        UserError: the file cannot be read or unpacked.
    """
    try:
        with source.file.open("rb") as raw:
            if not source.compression:
                yield raw, raw
                return
            with _UNPACK[source.compression](raw) as stream:
                yield stream, raw
    except ImportError as error:
        raise UserError(f"{source.name} needs the package zstandard: {EXTRA}") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error, _UnpackError) as error:
        raise UserError(f"{source.name} cannot be read ({error})") from error


UNPACK_MEMORY = 1 << 27
"""Most bytes that unpacking Zstandard may allocate; files that need more are refused. `zstd` needs less by
default."""
_PACKED = 1 << 10
"""Bytes of a Zstandard file unpacked at once; they hold at most 32 MiB of text."""


class _UnpackError(Exception):
    pass


class _Zstandard:
    """Reads Zstandard frames; unlike the package's own reader, it notices a truncated last frame."""

    def __init__(self, raw: IO[bytes]) -> None:
        import zstandard

        self._library = zstandard
        self._raw = raw
        self._frame: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, size: int) -> bytes:
        """At least about `size` bytes of text; empty at the end."""
        blocks: list[bytes] = []
        gathered = 0
        while gathered < size and (packed := self._raw.read(_PACKED)):
            if self._frame is None:
                decompressor = self._library.ZstdDecompressor(max_window_size=UNPACK_MEMORY)
                self._frame = decompressor.decompressobj()
            try:
                blocks.append(self._frame.decompress(packed))
            except self._library.ZstdError as error:
                raise _UnpackError(str(error)) from error
            gathered += len(blocks[-1])
            if self._frame.eof:
                # Bytes after the frame are read again, as the next frame.
                self._raw.seek(-len(self._frame.unused_data), 1)
                self._frame = None
        if gathered < size and self._frame is not None:
            raise EOFError("the file ends in the middle of a frame")
        return b"".join(blocks)


_UNPACK: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open, ".zst": _Zstandard}
