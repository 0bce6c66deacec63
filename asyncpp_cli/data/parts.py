"""Cuts the inputs into parts, each of which becomes a shard.

The cuts depend only on the inputs, not on the number of workers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asyncpp_cli.base.errors import UserError, need_polars
from asyncpp_cli.data.sources import READ, Source, has_zero, not_text, opened

SMALLEST, LARGEST = 1 << 20, 1 << 27
"""Least and most bytes of text in a part, approximately."""
PARTS = 64
"""Number of parts to aim for within these bounds."""
LONGEST = 1 << 22
"""Most bytes in a document; a longer one is cut at line ends."""
LONGEST_LINE = 1 << 26
"""Most bytes in a line of JSON, which is read whole; a longer one is refused."""

MOST_PACKED = 4
"""Most bytes of unpacked Parquet text in a part, as a multiple of the part's size; parts of files that unpack
to more have fewer rows."""


@dataclass(frozen=True, kw_only=True)
class InputPiece:
    """Whole documents of one file."""

    source: Source
    content: bytes = b""
    """Text or JSON lines; empty for Parquet."""
    first: int
    """First line or row, counted from 0."""
    rows: int = 0
    """Number of rows, for Parquet."""


@dataclass(kw_only=True)
class InputPart:
    """The input of one shard."""

    number: int
    pieces: list[InputPiece] = dataclasses.field(default_factory=list)
    size: int = 0
    """Bytes of text, approximately."""
    read: int = 0
    """Bytes of input files read for it."""


def part_size(sources: Sequence[Source]) -> int:
    """Bytes of text in a part of these inputs."""
    return min(LARGEST, max(SMALLEST, sum(source.size for source in sources) // PARTS))


def parts(sources: Sequence[Source], *, size: int, separator: str, field: str) -> Iterator[InputPart]:
    """Cut the inputs into parts.

    Args:
        sources: files, in order.
        size: bytes of text in a part, approximately.
        separator: line that ends a document in text files.
        field: holds the text in Parquet.

    Raises:
        UserError: a file cannot be read.
    """
    part = InputPart(number=0)
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
                part = InputPart(number=part.number + 1)
    if part.pieces:
        yield part


def _texts(source: Source, *, size: int, separator: str) -> Iterator[tuple[InputPiece, int, int]]:
    """Pieces of a file of text or JSON lines; of each its bytes of text, and bytes read of the file."""
    line, read, buffer = 0, 0, b""
    with opened(source) as (stream, raw):
        ended = False
        usual_length = size if source.kind == "lines" else max(size, LONGEST)
        wanted = usual_length
        while not ended:
            blocks = [buffer]
            gathered = len(buffer)
            while gathered < wanted and not ended:
                block = stream.read(READ)
                ended = not block
                blocks.append(block)
                gathered += len(block)
            buffer = b"".join(blocks)
            if not read and source.kind == "text" and has_zero(buffer):
                raise not_text(source)
            cut = len(buffer) if ended else _end_of_documents(buffer, source.kind, separator)
            if cut == 0:
                # The line of JSON is longer than the buffer.
                if len(buffer) > LONGEST_LINE:
                    raise too_long(source, line + 1)
                wanted = min(2 * len(buffer), LONGEST_LINE + READ)
                continue
            wanted = usual_length
            content, buffer = buffer[:cut], buffer[cut:]
            if content:
                yield InputPiece(source=source, content=content, first=line), len(content), raw.tell() - read
                line, read = line + lines_in(content), raw.tell()


def lines_in(content: bytes) -> int:
    """Number of line ends: LF, CRLF or CR."""
    return content.count(b"\n") + content.count(b"\r") - content.count(b"\r\n")


def too_long(source: Source, line: int) -> UserError:
    """The error for a line longer than `LONGEST_LINE`."""
    return UserError(
        f"{source.name}, line {line}: longer than {LONGEST_LINE >> 20} MiB; a line is one document"
    )


def _end_of_documents(buffer: bytes, kind: str, separator: str) -> int:
    """The end of the last whole document in `buffer`; 0 if more must be read."""
    if kind == "lines":
        return buffer.rfind(b"\n") + 1
    line, looked_at = separator_line(separator), READ
    while looked_at < 2 * len(buffer):
        if matches := list(line.finditer(buffer, max(0, len(buffer) - looked_at))):
            return matches[-1].end()
        looked_at *= 8
    return end_of_line(buffer[:LONGEST])


_BLANK = rb"(?:[ \t\v\f]|\xc2\xa0|\xe3\x80\x80|\xef\xbb\xbf)*"
"""Spaces that no editor shows, and byte order marks, in UTF-8."""


def separator_line(separator: str) -> re.Pattern[bytes]:
    """Matches a line that ends a document, from the end of the line before it up to its own end.

    Lines end in LF, CRLF or CR; spaces around the separator, and a byte order mark, do not matter.
    """
    # Two runs of blanks in a row would take time that grows with the square of a line of blanks.
    mark = re.escape(word.encode()) + _BLANK if (word := separator.strip()) else b""
    return re.compile(rb"(?:\r?\n|\r(?!\n))" + _BLANK + mark + rb"(?=[\r\n])")


def end_of_line(text: bytes) -> int:
    """Where to cut a text that is too long: after its last line, else between two characters."""
    if (last := max(text.rfind(b"\n"), text.rfind(b"\r"))) >= 0:
        return last + 1
    cut = len(text)
    while cut > 1 and text[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    return cut - 1 if text[cut - 1] & 0x80 else len(text)


def _rows(source: Source, *, size: int, column: str) -> Iterator[tuple[InputPiece, int, int]]:
    need_polars()
    import polars

    try:
        table = polars.scan_parquet(source.file)
        columns = table.collect_schema()
        if column not in columns:
            raise UserError(f"{source.name}: no column {column!r} (--field); columns: {', '.join(columns)}")
        if columns[column] != polars.String:
            raise UserError(f"{source.name}: the column {column!r} is {columns[column]}, not text")
        sizes = polars.col(column).str.len_bytes().cast(polars.UInt64)
        rows, unpacked = table.select(polars.len(), sizes.sum()).collect(engine="streaming").row(0)
    except (OSError, polars.exceptions.PolarsError) as error:
        raise UserError(f"{source.name} cannot be read as Parquet ({error})") from error
    # Text is about twice as large as in a Parquet file.
    unpacked_size = max(2 * source.size, unpacked // MOST_PACKED)
    rows_per_part = max(1, rows * size // unpacked_size)
    for first in range(0, rows, rows_per_part):
        count = min(rows_per_part, rows - first)
        share = source.size * (first + count) // rows - source.size * first // rows
        yield InputPiece(source=source, first=first, rows=count), 2 * share, share
