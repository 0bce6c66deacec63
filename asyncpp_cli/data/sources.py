"""Files of text: which there are, of which kind, and how they are opened."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from asyncpp_cli.errors import UserError

COMPRESSIONS = (".gz", ".xz", ".bz2", ".zst")
KINDS = {".jsonl": "lines", ".ndjson": "lines", ".json": "lines", ".parquet": "parquet"}
"""Kind of a file by its suffix; every other is text."""
EXTRA = 'pip install "asyncpp[data]"'


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file of documents."""

    file: Path
    name: str
    """As the user reaches it, for messages and the manifest."""
    kind: str
    """`text`, `lines` (one JSON object a line) or `parquet`."""
    compression: str
    """A suffix of `COMPRESSIONS`, or nothing."""
    size: int
    """Bytes on disk."""


def find_sources(inputs: Sequence[str]) -> list[Source]:
    """The files that inputs name, in their order; those of a folder or a pattern sorted by name.

    Args:
        inputs: files, folders (with all below them) and patterns as the shell has them, `**` included.

    Raises:
        UserError: an input is not there or holds nothing that can be read, or a file is named twice.
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
    path = Path(name).expanduser()
    if path.is_file():
        source = _source(path, name)
        if source.size == 0:
            raise UserError(f"{name} is empty")
        yield source
        return
    if path.is_dir():
        root, found = path, path.rglob("*")
    elif any(character in name for character in "*?["):
        root = Path(path.anchor)
        found = root.glob(str(path.relative_to(root)))
    else:
        raise UserError(
            f"{name} does not exist; a file, a folder or a pattern such as 'texts/*.jsonl' is accepted"
        )
    files = sorted(file for file in found if file.is_file() and not _hidden(file.relative_to(root)))
    shown = {file: str(file.relative_to(path)) if path.is_dir() else str(file) for file in files}
    sources = [source for file in files if _readable(source := _source(file, shown[file]))]
    if not sources:
        raise UserError(f"{name} holds no text, JSON lines or Parquet")
    yield from sources


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _source(file: Path, name: str) -> Source:
    compression = file.suffix.lower() if file.suffix.lower() in COMPRESSIONS else ""
    plain = file.with_suffix("") if compression else file
    kind = KINDS.get(plain.suffix.lower(), "text")
    return Source(file=file, name=name, kind=kind, compression=compression, size=file.stat().st_size)


def _readable(source: Source) -> bool:
    """Whether a file that was not named itself is one to read: no pictures, no programs."""
    from stages.text import is_text

    if source.size == 0:
        return False
    return source.kind != "text" or bool(source.compression) or is_text(source.file)


@contextmanager
def opened(source: Source) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The text of a file, and the file itself: its position tells how far reading has come.

    Raises:
        UserError: it cannot be read or unpacked.
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
"""Bytes that unpacking may take; files packed for more are refused. What `zstd` and `xz` make by themselves
takes less."""
_PACKED = 1 << 10
"""Bytes of a Zstandard file unpacked at once: they may stand for 32 MiB of text, but for no more."""


class _UnpackError(Exception):
    pass


class _Xz:
    """Reads streams of xz one after the other; unlike `lzma.open` with a bound on the memory it takes."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._stream = lzma.LZMADecompressor(memlimit=UNPACK_MEMORY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, size: int) -> bytes:
        """At most `size` bytes of text; none at the end."""
        while True:
            if self._stream.eof:
                # Streams are padded with zeros.
                packed = self._stream.unused_data
                while not (rest := packed.lstrip(b"\0")) and (packed := self._raw.read(1 << 16)):
                    pass
                if not rest:
                    return b""
                self._stream = lzma.LZMADecompressor(memlimit=UNPACK_MEMORY)
            elif self._stream.needs_input and not (rest := self._raw.read(1 << 16)):
                raise EOFError("the file ends in the middle of a stream")
            elif not self._stream.needs_input:
                rest = b""
            if text := self._stream.decompress(rest, size):
                return text


class _Zstandard:
    """Reads frames of Zstandard; unlike the package's own reader it notices where the last is cut off."""

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
        """About `size` bytes of text, or more; none at the end."""
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
                # What comes after it is read again, as the next frame.
                self._raw.seek(-len(self._frame.unused_data), 1)
                self._frame = None
        if gathered < size and self._frame is not None:
            raise EOFError("the file ends in the middle of a frame")
        return b"".join(blocks)


_UNPACK: dict[str, Any] = {".gz": gzip.open, ".xz": _Xz, ".bz2": bz2.open, ".zst": _Zstandard}
