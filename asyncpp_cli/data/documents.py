"""The documents in a piece of an input, and which of them are held out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b

from asyncpp_cli.data.parts import LONGEST, LONGEST_LINE, Piece, end_of_line, import_polars, too_long
from asyncpp_cli.errors import UserError


def documents(piece: Piece, *, field: str, separator: str) -> Iterator[bytes]:
    """The documents of a piece as UTF-8, in order; empty ones are left out.

    Args:
        piece: of a file.
        field: that holds the text in JSON lines and Parquet.
        separator: line that ends a document in a file of text. Newlines around a document are dropped.

    Raises:
        UserError: names the file and the line, row or byte where it is not what it should be.
    """
    match piece.source.kind:
        case "lines":
            found = _of_lines(piece, field)
        case "parquet":
            found = _of_rows(piece, field)
        case _:
            found = _of_text(piece, separator)
    return (document for document in found if document)


def is_held_out(document: bytes, *, share: float) -> bool:
    """Whether a document is for validation: by its content alone, so that copies of it stay together."""
    return int.from_bytes(blake2b(document, digest_size=8).digest(), "big") < share * 2.0**64


def _of_text(piece: Piece, separator: str) -> Iterator[bytes]:
    try:
        piece.content.decode()
    except UnicodeDecodeError as error:
        line = piece.first + piece.content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{piece.source.name}, line {line}: not UTF-8 text ({error.reason})") from error
    mark = separator.encode()
    # A line of its own: what stands inside of a line separates nothing.
    for text in (b"\n" + piece.content + b"\n").split(b"\n" + mark + b"\n"):
        text = text.strip(b"\n")
        while mark and (text == mark or text.startswith(mark + b"\n")):
            text = text[len(mark) :].strip(b"\n")
        yield from _cut(text)


def _cut(text: bytes) -> Iterator[bytes]:
    while len(text) > LONGEST:
        cut = end_of_line(text[:LONGEST])
        yield text[:cut].strip(b"\n")
        text = text[cut:]
    yield text


def _of_lines(piece: Piece, field: str) -> Iterator[bytes]:
    for number, line in enumerate(piece.content.split(b"\n"), start=piece.first + 1):
        if not line.strip():
            continue
        where = f"{piece.source.name}, line {number}"
        if len(line) > LONGEST_LINE:
            raise too_long(piece.source, number)
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not JSON ({error})") from error
        if not isinstance(content, dict) or field not in content:
            known = ", ".join(list(content)[:10]) if isinstance(content, dict) else "none"
            raise UserError(f"{where}: no field {field!r} (--field); there are: {known}")
        text = content[field]
        if not isinstance(text, str):
            raise UserError(f"{where}: the field {field!r} holds no text")
        yield from _cut(text.encode("utf-8", "replace"))


def _of_rows(piece: Piece, field: str) -> Iterator[bytes]:
    polars = import_polars(piece.source)
    name = piece.source.name
    try:
        table = polars.scan_parquet(piece.source.file)
        columns = table.collect_schema()
        if field not in columns:
            raise UserError(f"{name}: no column {field!r} (--field); there are: {', '.join(columns)}")
        if columns[field] != polars.String:
            raise UserError(f"{name}: the column {field!r} holds {columns[field]}, no text")
        texts = table.select(field).slice(piece.first, piece.rows).collect()[field]
    except (OSError, polars.exceptions.PolarsError) as error:
        raise UserError(f"{name}, rows from {piece.first}: cannot be read ({error})") from error
    for text in texts:
        if text is not None:
            yield from _cut(text.encode())
