"""Reads the documents of an input and decides which are held out for validation."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

from asyncpp_cli.base.errors import UserError, need_polars
from asyncpp_cli.data.parts import (
    LONGEST,
    LONGEST_LINE,
    InputPiece,
    end_of_line,
    lines_in,
    separator_line,
    too_long,
)
from asyncpp_cli.data.sources import begins_as_utf16

_LINE_ENDS = b"\r\n"


class Document(NamedTuple):
    """A document, as UTF-8."""

    text: bytes
    piece: InputPiece
    number: int
    """Line, or row of Parquet, at which it begins, counted from 1."""

    def __str__(self) -> str:
        """Where it is, for messages."""
        unit = "row" if self.piece.source.kind == "parquet" else "line"
        return f"{self.piece.source.name}, {unit} {self.number}"


def documents(piece: InputPiece, *, field: str, separator: str) -> Iterator[Document]:
    """The documents of a piece, in order, without empty ones.

    Args:
        piece: part of a file to read.
        field: holds the text in JSON lines and Parquet.
        separator: line that ends a document in a text file. Line ends around a document are dropped.

    Raises:
        UserError: the piece is not valid; names the file and the line, row or byte.
    """
    match piece.source.kind:
        case "lines":
            texts = _from_lines(piece, field)
        case "parquet":
            texts = _from_rows(piece, field)
        case _:
            texts = _from_text(piece, separator)
    for number, text in texts:
        yield from (Document(part, piece, number) for part in _cut(text) if part)


def is_held_out(document: bytes, *, share: float) -> bool:
    """Whether a document is held out; decided by its content alone, so that copies share a split."""
    return _hash(document) < share * 2.0**64


def _hash(document: bytes) -> int:
    return int.from_bytes(blake2b(document, digest_size=8).digest(), "big")


def exact_share(documents: Iterable[bytes], *, share: float) -> float:
    """The share of all hashes at which `share` of these documents, to the nearest one, are held out.

    Not all of two or more; copies stay together. 0: the nearest is none, or the documents are all alike.
    """
    hashes = sorted(map(_hash, documents))
    wanted = min(round(share * len(hashes)), len(hashes) - 1)
    between = [place for place in range(1, len(hashes)) if hashes[place - 1] < hashes[place]]
    if wanted < 1 or not between:
        return 0.0
    place = min(between, key=lambda place: abs(place - wanted))
    return (hashes[place - 1] + hashes[place]) / 2.0**65


def _from_text(piece: InputPiece, separator: str) -> Iterator[tuple[int, bytes]]:
    try:
        piece.content.decode()
    except UnicodeDecodeError as error:
        line = piece.first + lines_in(piece.content[: error.start]) + 1
        hint = "; convert it: iconv -f UTF-16 -t UTF-8" if begins_as_utf16(piece.content) else ""
        raise UserError(f"{piece.source.name}, line {line}: not UTF-8 text ({error.reason}){hint}") from error
    # Only a line of its own separates; the same text within a line does not.
    line = piece.first
    for text in separator_line(separator).split(b"\n" + piece.content + b"\n"):
        begin = len(text) - len(text.lstrip(_LINE_ENDS))
        yield line + lines_in(text[:begin]), text[begin:].removeprefix(BOM_UTF8).strip(_LINE_ENDS)
        line += lines_in(text) + 1


def _cut(text: bytes) -> Iterator[bytes]:
    while len(text) > LONGEST:
        cut = end_of_line(text[:LONGEST])
        yield text[:cut].strip(_LINE_ENDS)
        text = text[cut:]
    yield text


def _from_lines(piece: InputPiece, field: str) -> Iterator[tuple[int, bytes]]:
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
            fields = ", ".join(list(content)[:10]) if isinstance(content, dict) else "none"
            raise UserError(f"{where}: no field {field!r} (--field); fields: {fields}")
        text = content[field]
        if not isinstance(text, str):
            raise UserError(f"{where}: the field {field!r} is not text")
        yield number, text.encode("utf-8", "replace")


def _from_rows(piece: InputPiece, field: str) -> Iterator[tuple[int, bytes]]:
    need_polars()
    import polars

    try:
        table = polars.scan_parquet(piece.source.file).select(field)
        texts = table.slice(piece.first, piece.rows).collect()[field]
    except (OSError, polars.exceptions.PolarsError) as error:
        raise UserError(f"{piece.source.name}, rows from {piece.first}: cannot be read ({error})") from error
    for number, text in enumerate(texts, start=piece.first + 1):
        if text is not None:
            yield number, text.encode()
