"""Unpacked sizes of a Parquet column, read from the file's footer and page headers.

Both are structs in Thrift's compact protocol; parquet-format's parquet.thrift defines the field numbers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

MAGIC = b"PAR1"
_LONGEST_FOOTER = 1 << 27
_HEADERS = (1 << 12, 1 << 24)
"""Bytes to read for a page header, first and second try; only long statistics make a header long."""


@dataclass(frozen=True)
class TextSize:
    """Unpacked bytes of a column."""

    total: int
    largest_page: int
    """A reader unpacks at least one page at once."""


def text_size(file: Path, column: str) -> TextSize:
    """The unpacked size of a Parquet file's column.

    Raises:
        ValueError: the file is not valid Parquet.
        OSError: the file cannot be read.
    """
    total, largest = 0, 0
    with file.open("rb") as opened:
        size = file.stat().st_size
        try:
            for chunk in _chunks(opened, size):
                if ".".join(part.decode() for part in chunk[3]) != column:
                    continue
                total += chunk[6]
                at = min(chunk[9], chunk.get(11) or chunk[9])
                end = at + chunk[7]
                if at < 0:
                    raise ValueError("a column chunk lies before the file")
                while at < end:
                    header, length = _page(opened, at)
                    largest = max(largest, header[2])
                    if header[3] < 0:
                        raise ValueError("a page has a negative size")
                    at += length + header[3]
        except (LookupError, TypeError, AttributeError, struct.error, RecursionError) as error:
            raise ValueError(f"its footer or a page header is damaged ({error!r})") from error
    return TextSize(total, largest)


def _chunks(opened: IO[bytes], size: int) -> list[dict[int, Any]]:
    """The metadata of every column chunk."""
    opened.seek(max(0, size - 8))
    end = opened.read(8)
    if len(end) < 8 or end[4:] != MAGIC:
        raise ValueError("it does not end with PAR1")
    length = int.from_bytes(end[:4], "little")
    if length > min(size - 8, _LONGEST_FOOTER):
        raise ValueError(f"its footer claims {length} bytes")
    opened.seek(size - 8 - length)
    footer, _ = _struct(opened.read(length), 0)
    return [chunk[3] for group in footer[4] for chunk in group[1]]


def _page(opened: IO[bytes], at: int) -> tuple[dict[int, Any], int]:
    """The header of a page and its length."""
    for length in _HEADERS:
        opened.seek(at)
        try:
            return _struct(opened.read(length), 0)
        except IndexError:
            if length == _HEADERS[-1]:
                raise
    raise AssertionError


def _number(raw: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _signed(raw: bytes, at: int) -> tuple[int, int]:
    value, at = _number(raw, at)
    return (value >> 1) ^ -(value & 1), at


def _struct(raw: bytes, at: int) -> tuple[dict[int, Any], int]:
    """The fields by number, and the position after the struct."""
    fields: dict[int, Any] = {}
    key = 0
    while (head := raw[at]) != 0:
        at += 1
        if head >> 4:
            key += head >> 4
        else:
            key, at = _signed(raw, at)
        kind = head & 15
        if kind in (1, 2):
            fields[key] = kind == 1
        else:
            fields[key], at = _value(raw, at, kind)
    return fields, at + 1


def _value(raw: bytes, at: int, kind: int) -> tuple[Any, int]:
    match kind:
        case 1 | 2 | 3:
            return raw[at], at + 1
        case 4 | 5 | 6:
            return _signed(raw, at)
        case 7:
            return struct.unpack_from("<d", raw, at)[0], at + 8
        case 8:
            length, at = _number(raw, at)
            if at + length > len(raw):
                raise IndexError(at + length)
            return raw[at : at + length], at + length
        case 9 | 10:
            head = raw[at]
            count, at = (head >> 4, at + 1) if head >> 4 != 15 else _number(raw, at + 1)
            items = []
            for _ in range(count):
                item, at = _value(raw, at, head & 15)
                items.append(item)
            return items, at
        case 12:
            return _struct(raw, at)
    raise ValueError(f"a value of type {kind}")
