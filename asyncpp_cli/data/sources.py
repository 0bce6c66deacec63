"""Finds input files, tells their kinds, and opens them."""

from __future__ import annotations

import bz2
import glob
import gzip
import lzma
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from asyncpp_cli.base.console import say
from asyncpp_cli.base.errors import UserError
from stages.data.text import is_hidden

COMPRESSIONS = (".gz", ".xz", ".bz2", ".zst")
KINDS = {".jsonl": "lines", ".ndjson": "lines", ".json": "lines", ".parquet": "parquet"}
"""Kind of a file by its suffix; other files are text."""
_PACKED_STARTS = (
    *(b"BZh%d1AY" % level for level in range(1, 10)),
    *(b"\x1f\x8b", b"\x1f\x9d", b"\x1f\xa0", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18"),
    *(b"PK\x03\x04", b"LZIP\x01", b"7z\xbc\xaf", b"Rar!\x1a", b"\x5d\x00\x00"),
)
"""How files of bzip2, gzip, compress, xz, Zstandard, lz4, zip, lzip, 7-Zip, rar and lzma begin."""
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
            raise not_text(source)
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
    sources = [_source(file, names[file]) for file in files]
    skipped = [source.name for source in sources if _is_binary(source)]
    readable = [source for source in sources if source.size and source.name not in skipped]
    if not readable:
        raise UserError(f"{name} holds no text, JSON lines or Parquet")
    if skipped:
        more = f" and {len(skipped) - 1} more" if skipped[1:] else ""
        say(f"note: {name}: {skipped[0]}{more} not read: no text")
    yield from readable


def _source(file: Path, name: str) -> Source:
    compression = file.suffix.lower() if file.suffix.lower() in COMPRESSIONS else ""
    plain = file.with_suffix("") if compression else file
    kind = KINDS.get(plain.suffix.lower(), "text")
    return Source(file=file, name=name, kind=kind, compression=compression, size=file.stat().st_size)


def _is_binary(source: Source) -> bool:
    """Whether what should be text has a zero byte near its start; UTF-16 is refused when it is read.

    Raises:
        UserError: it is packed, and its name does not say so.
    """
    if source.kind == "parquet" or source.compression:
        return False
    try:
        with source.file.open("rb") as file:
            start = file.read(1024)
    except OSError:  # said when it is read
        return False
    if start.startswith(_PACKED_STARTS):
        raise UserError(
            f"{source.name} is compressed or an archive; accepted: text, or text compressed as "
            f"{', '.join(COMPRESSIONS)}, with that in its name"
        )
    return source.kind == "text" and has_zero(start)


def has_zero(start: bytes) -> bool:
    """Whether the start of a file is that of no text; UTF-16 is another matter."""
    return b"\0" in start[:1024] and not begins_as_utf16(start)


def not_text(source: Source) -> UserError:
    """The error for a file with a zero byte near its start."""
    what = "an archive" if source.compression else "UTF-16? convert it with iconv"
    return UserError(f"{source.name} is not text: it has a zero byte ({what})")


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
    except (OSError, EOFError, zlib.error, _UnpackError) as error:
        raise UserError(f"{source.name} cannot be read ({error})") from error


UNPACK_MEMORY = 1 << 27
"""Most bytes that unpacking Zstandard may allocate; files that need more are refused. `zstd` needs less by
default."""
READ = 1 << 20
"""Bytes to read at once."""
_PACKED = 1 << 10
"""Packed bytes read at once; of Zstandard they hold at most 32 MiB of text."""


class _UnpackError(Exception):
    pass


class _Streams:
    """Reads a compressed file of one stream (or frame) after the other. Python's own readers of .xz and .bz2
    leave out everything behind the first bytes that begin no stream, and say nothing.

    Args:
        raw: the file.
        begin: makes the decompressor of one stream.
        bounded: whether the decompressor takes the number of bytes that it may return.
        padding: multiple of zero bytes that may follow a stream; 0: none.
        errors: what the decompressor raises.
    """

    def __init__(
        self,
        raw: IO[bytes],
        begin: Callable[[], Any],
        *,
        bounded: bool = True,
        padding: int = 0,
        errors: tuple[type[Exception], ...],
    ) -> None:
        self._raw, self._begin, self._padding, self._errors = raw, begin, padding, errors
        self._limit = (READ,) if bounded else ()
        self._stream = begin()
        self._streams = 0
        """Number of streams that have been read to their end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, size: int) -> bytes:
        """At least about `size` bytes of text; empty at the end."""
        blocks: list[bytes] = []
        gathered = 0
        while gathered < size:
            packed = b""
            if self._stream is None or not self._limit or self._stream.needs_input:
                packed = self._raw.read(_PACKED)
                if not packed:
                    break
            self._stream = self._stream or self._begin()
            blocks.append(self._unpack(packed))
            gathered += len(blocks[-1])
            if self._stream.eof:
                # Bytes after the stream are read again, as padding or the next stream.
                self._raw.seek(-len(self._stream.unused_data), 1)
                self._stream = None
                self._streams += 1
                self._skip_padding()
        if gathered < size and self._stream is not None:
            raise EOFError("the file ends in the middle of a stream")
        return b"".join(blocks)

    def _unpack(self, packed: bytes) -> bytes:
        try:
            text: bytes = self._stream.decompress(packed, *self._limit)
        except self._errors as error:
            behind = f"behind stream {self._streams}: " if self._streams else ""
            raise _UnpackError(f"{behind}{error}") from error
        return text

    def _skip_padding(self) -> None:
        while self._padding and (zeros := self._raw.read(self._padding)):
            if zeros != bytes(self._padding):
                self._raw.seek(-len(zeros), 1)
                return


def _zstandard(raw: IO[bytes]) -> _Streams:
    import zstandard

    def begin() -> Any:
        return zstandard.ZstdDecompressor(max_window_size=UNPACK_MEMORY).decompressobj()

    return _Streams(raw, begin, bounded=False, errors=(zstandard.ZstdError,))


def _xz(raw: IO[bytes]) -> _Streams:
    # The format allows padding of a multiple of four zeros between and behind streams.
    return _Streams(raw, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), padding=4, errors=(lzma.LZMAError,))


def _bzip2(raw: IO[bytes]) -> _Streams:
    return _Streams(raw, bz2.BZ2Decompressor, errors=(OSError, ValueError))


_UNPACK: dict[str, Any] = {".gz": gzip.open, ".xz": _xz, ".bz2": _bzip2, ".zst": _zstandard}
