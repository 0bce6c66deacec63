"""The inputs cut into parts: the pieces of work, each of which becomes a shard.

Where the cuts are depends on the inputs alone, never on who does the work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from asyncpp_cli.data.parquet_sizes import text_size
from asyncpp_cli.data.sources import EXTRA, Source, opened
from asyncpp_cli.errors import UserError
from asyncpp_cli.threads import need_polars

READ = 1 << 20
SMALLEST, LARGEST = 1 << 20, 1 << 27
"""Bytes of text in a part, about."""
PARTS = 64
"""Aimed at, between these bounds."""
LONGEST = 1 << 22
"""Bytes in a document; a longer one is cut at the ends of lines."""
LONGEST_LINE = 1 << 26
"""Bytes in a line of JSON; a longer one is refused, since it is read whole."""

LONGEST_PAGE = 1 << 28
"""Bytes in a page of Parquet; one that is longer is refused, since it is unpacked whole."""
MOST_PACKED = 4
"""Times its usual room that text of Parquet may take in a part; where it is packed further, parts have fewer
rows."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Whole documents of one file."""

    source: Source
    content: bytes = b""
    """Text, or JSON lines. Of Parquet: empty."""
    first: int
    """Line that `content` begins with, or the first row; counted from 0."""
    rows: int = 0
    """Of Parquet."""


@dataclass(kw_only=True)
class Part:
    """What becomes one shard."""

    number: int
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    size: int = 0
    """Bytes of text, about."""
    read: int = 0
    """Bytes of input files read for it."""


def part_size(sources: Sequence[Source]) -> int:
    """Bytes of text in a part of these inputs."""
    return min(LARGEST, max(SMALLEST, sum(source.size for source in sources) // PARTS))


def parts(sources: Sequence[Source], *, size: int, separator: str, field: str) -> Iterator[Part]:
    """The inputs, cut.

    Args:
        sources: in order.
        size: bytes of text in a part, about.
        separator: line that ends a document in files of text.
        field: that holds the text in Parquet.

    Raises:
        UserError: a file cannot be read.
    """
    part = Part(number=0)
    for source in sources:
        pieces = (
            _rows(source, size=size, column=field)
            if source.kind == "parquet"
            else _texts(source, size=size, separator=separator)
        )
        for piece, length, read in pieces:
            part.pieces.append(piece)
            part.size += length
            part.read += read
            if part.size >= size:
                yield part
                part = Part(number=part.number + 1)
    if part.pieces:
        yield part


def _texts(source: Source, *, size: int, separator: str) -> Iterator[tuple[Piece, int, int]]:
    line, read, buffer = 0, 0, b""
    with opened(source) as (stream, raw):
        ended = False
        usual = size if source.kind == "lines" else max(size, LONGEST)
        wanted = usual
        while not ended:
            blocks = [buffer]
            gathered = len(buffer)
            while gathered < wanted and not ended:
                block = stream.read(READ)
                ended = not block
                blocks.append(block)
                gathered += len(block)
            buffer = b"".join(blocks)
            cut = len(buffer) if ended else _end_of_documents(buffer, source.kind, separator)
            if cut == 0:
                # A line of JSON that is longer than all of that.
                if len(buffer) > LONGEST_LINE:
                    raise too_long(source, line + 1)
                wanted = min(2 * len(buffer), LONGEST_LINE + READ)
                continue
            wanted = usual
            content, buffer = buffer[:cut], buffer[cut:]
            if content:
                yield Piece(source=source, content=content, first=line), len(content), raw.tell() - read
                line, read = line + content.count(b"\n"), raw.tell()


def too_long(source: Source, line: int) -> UserError:
    """What is said of a line that is longer than `LONGEST_LINE`."""
    return UserError(
        f"{source.name}, line {line}: longer than {LONGEST_LINE >> 20} MiB; a line is one document"
    )


def _end_of_documents(buffer: bytes, kind: str, separator: str) -> int:
    """Where the last whole document in `buffer` ends; 0 where more must be read to know."""
    if kind == "lines":
        return buffer.rfind(b"\n") + 1
    mark = f"\n{separator}\n".encode()
    if (last := buffer.rfind(mark)) >= 0:
        return last + len(mark)
    return end_of_line(buffer[:LONGEST])


def end_of_line(text: bytes) -> int:
    """Where to cut a text that is too long: after its last line, or else before a character begins."""
    if (last := text.rfind(b"\n")) >= 0:
        return last + 1
    cut = len(text)
    while cut > 1 and text[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    return cut - 1 if text[cut - 1] & 0x80 else len(text)


def _rows(source: Source, *, size: int, column: str) -> Iterator[tuple[Piece, int, int]]:
    polars = import_polars(source)
    try:
        text = text_size(source.file, column)
        rows = int(polars.scan_parquet(source.file).select(polars.len()).collect().item())
    except (OSError, ValueError, polars.exceptions.PolarsError) as error:
        raise UserError(f"{source.name} is not Parquet that can be read ({error})") from error
    if text.largest_page > LONGEST_PAGE:
        raise UserError(
            f"{source.name}: a page of {column!r} has {text.largest_page >> 20} MiB unpacked, all of it at "
            f"once; accepted: up to {LONGEST_PAGE >> 20} MiB (write it with smaller pages or texts)"
        )
    # Text takes about twice the room that it has in a Parquet file.
    packed = max(2 * source.size, text.total // MOST_PACKED)
    at_once = max(1, rows * size // packed)
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        share = source.size * (first + count) // rows - source.size * first // rows
        yield Piece(source=source, first=first, rows=count), 2 * share, share


def import_polars(source: Source) -> Any:
    """The library that reads Parquet.

    Raises:
        UserError: it is not installed.
    """
    need_polars()
    try:
        import polars
    except ImportError as error:
        raise UserError(f"{source.name}: Parquet needs the package polars: {EXTRA}") from error
    return polars
