"""Records: JSON and YAML files that are declared as types, and the one codec that reads and writes them.

A record is declared once, as a subclass of `Record`; its fields' types and `Meta` say what is accepted:

    class Cell(Record, frozen=True, kw_only=True):
        id: Annotated[str, Meta(pattern="[a-z]+", description="lower-case letters")]
        steps: Count = 0

    cell = read_record(file, Cell)
    file.write_bytes(encoded(cell))

A file's record ends in a checksum of the text before it, so that a flipped digit is seen when it is read. A
file without one is accepted: people and tools may write records.

Every refusal is a DamagedError that names the file, the key and what is accepted. Unknown keys are ignored: a
later version may add some. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import threading
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta as Meta
from msgspec import inspect as types

MOST_BYTES = 1 << 26
"""Largest record that is read, in bytes, unless a reader says otherwise."""

Count = Annotated[int, Meta(ge=0, le=2**53)]
"""A whole number that every reader of JSON represents exactly."""


class DamagedError(Exception):
    """A file cannot be read: it is truncated, malformed, or written by a newer asyncpp."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a file, or a part of it, holds."""


class FileRecord(Record, frozen=True, kw_only=True):
    """What a whole file holds, with the number of its format."""

    format: Count = 1


Kind = TypeVar("Kind")


def open_file(file: Path, *, follow_links: bool = True) -> BufferedReader:
    """Open a regular file for reading. Never waits, as a pipe without a writer would.

    Raises:
        FileNotFoundError: it does not exist.
        DamagedError: it cannot be opened, or is a folder, pipe or device (or a link, unless followed).
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(file, flags)
    except FileNotFoundError:
        raise
    except NotADirectoryError as error:
        raise FileNotFoundError(error.errno, error.strerror, str(file)) from error
    except OSError as error:
        raise DamagedError(f"{file} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DamagedError(f"{str(file)!r} cannot be read ({error})") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedError(f"{file} cannot be read (it is not a regular file)")
    return os.fdopen(descriptor, "rb")


def read_bytes(file: Path, *, most: int = MOST_BYTES, follow_links: bool = True) -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises:
        FileNotFoundError: it does not exist.
        DamagedError: as `open_file`; or it cannot be read, or is larger.
    """
    with open_file(file, follow_links=follow_links) as opened:
        try:
            # `read` makes room for as much as it is told to read.
            size = os.fstat(opened.fileno()).st_size
            content = opened.read(min(size, most) + 1)
            content += opened.read(most + 1 - len(content)) if len(content) > size else b""
        except OSError as error:
            raise DamagedError(f"{file} cannot be read ({error.strerror})") from error
    if len(content) > most:
        raise DamagedError(f"{file} is larger than {most:,} bytes")
    return content


def read_text(file: Path, *, most: int = MOST_BYTES) -> str:
    """The content of a file of UTF-8 text; arguments and errors as for `read_bytes`."""
    try:
        return read_bytes(file, most=most).decode()
    except UnicodeDecodeError as error:
        raise DamagedError(f"{file} is not UTF-8 text (byte {error.start})") from error


def read_record(file: Path, kind: type[Kind]) -> Kind:
    """The record in a JSON file.

    Raises:
        FileNotFoundError: it does not exist.
        DamagedError: it cannot be read, or is no such record; or its `format` is above 1.
    """
    return decoded(read_bytes(file), kind, where=str(file))


def decoded(content: bytes | str, kind: type[Kind], *, where: str, newest_format: int = 1) -> Kind:
    """The record in a JSON text. NaN and Infinity are accepted, as Python writes them.

    Args:
        content: the text.
        kind: the type declared for it.
        where: names the text in errors: a file, or a line of one.
        newest_format: largest accepted value of the key `format`.

    Raises:
        DamagedError: it is not JSON, or no such record, or does not match its checksum.
    """
    return converted(loaded(content, where=where, newest_format=newest_format), kind, where=where)


def loaded(content: bytes | str, *, where: str, newest_format: int = 1) -> Any:
    """The plain data in a JSON text, before it is a record; see `decoded`."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        # Also raised for numbers of thousands of digits and for deeply nested brackets.
        raise DamagedError(f"{where} is not JSON ({str(error)[:200]})") from error
    if isinstance(data, dict):
        if type(written := data.get("format", 0)) is not int:
            accepted = f"whole numbers up to {newest_format}"
            raise DamagedError(f"{where} has format {written!r:.60}, accepted: {accepted}")
        if written > newest_format:
            raise DamagedError(f"{where} has format {written}: a newer asyncpp wrote it")
        if data.pop(CHECKSUM, None) is not None and not is_intact(content):
            raise DamagedError(f"{where} does not match its checksum: it was changed after it was written")
    return data


_PREPARED: set[object] = set()
_PREPARING = threading.Lock()


def converted(data: Any, kind: type[Kind], *, where: str) -> Kind:
    """Plain data (from JSON or YAML) as a record; see `decoded`."""
    if kind not in _PREPARED:
        # msgspec crashes where two threads prepare one type at once.
        with _PREPARING:
            msgspec.json.Decoder(kind)
            _PREPARED.add(kind)
    try:
        return msgspec.convert(data, kind)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        raise DamagedError(f"{where}: {_refusal(str(error), data, kind)}") from error


def encoded(record: object) -> bytes:
    """A record as a file's one line of JSON with its checksum; NaN and Infinity as Python writes them."""
    return with_checksum(json.dumps(plain(record)))


CHECKSUM = "checksum"
"""Last key of a record in a file."""
_CHECKED = re.compile(rb'(.*), "checksum": "([0-9a-f]{64})"\}\s*', re.DOTALL)


def with_checksum(text: str, *, before: Any = None) -> bytes:
    """A JSON object as a line whose last key is the SHA-256 of the text before it.

    Args:
        text: the object, not empty.
        before: hash of what precedes the line (a `hashlib` object); None: it stands alone.
    """
    start = text.encode().removesuffix(b"}")
    digest = hashlib.sha256() if before is None else before.copy()
    digest.update(start)
    return start + f', "{CHECKSUM}": "{digest.hexdigest()}"}}\n'.encode()


def is_intact(content: bytes | str) -> bool:
    """Whether a text ends in the checksum of what precedes it."""
    match = _CHECKED.fullmatch(content.encode() if isinstance(content, str) else content)
    return match is not None and hashlib.sha256(match[1]).hexdigest().encode() == match[2]


def plain(record: object) -> Any:
    """A record as plain data: mappings, lists, text, numbers, true, false and null."""
    return msgspec.to_builtins(record)


_PLACE = re.compile(r"(.*?)(?: - at `(?:key` in `)?\$(.*)`)?", re.DOTALL)
_FIELD = re.compile(r"Object (missing required|contains unknown) field `(.*)`", re.DOTALL)
_PART = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")


def _refusal(message: str, data: Any, kind: object) -> str:
    """msgspec's message in words for people: the key, its value, and what is accepted.

    "Expected `int`, got `str` - at `$.cells[2].steps`" becomes
    'cells[2].steps is "x"; accepted: a whole number'.
    """
    what, path = _PLACE.fullmatch(message).groups()  # type: ignore[union-attr]
    path, field = path or "", _FIELD.fullmatch(what)
    if field is not None:
        path += f".{field[2]}"
    declared: types.Type | None = types.type_info(kind)
    value, has_value = data, field is None
    for name, index in _PART.findall(path):
        declared = _inside(declared, name)
        if index == "...":
            has_value = False  # of some key of a mapping, which msgspec does not name
        elif has_value:
            value = value[name] if name else value[int(index)]
    key = path.removeprefix(".") or "the file"
    if field is not None:
        problem = "is missing" if field[1].startswith("missing") else "is unknown"
    elif has_value and not isinstance(value, dict | list):
        problem = f"is {json.dumps(value):.60}"
    else:
        problem = "is not accepted"
    return f"{key} {problem}; accepted: {_accepted(declared) if declared is not None else what}"


def _inside(declared: types.Type | None, name: str) -> types.Type | None:
    """The type declared for a key, or for the items of a list, of a mapping, or of either in a union."""
    match declared:
        case types.Metadata():
            return _inside(declared.type, name)
        case types.UnionType():
            return next((found for each in declared.types if (found := _inside(each, name))), None)
        case types.StructType() | types.DataclassType() if name:
            return next((field.type for field in declared.fields if field.encode_name == name), None)
        case types.DictType():
            return declared.value_type
        case types.ListType() | types.VarTupleType():
            return declared.item_type
    return None


def _accepted(declared: types.Type) -> str:
    """What a type accepts, for people."""
    match declared:
        case types.Metadata():
            return str((declared.extra_json_schema or {}).get("description") or _accepted(declared.type))
        case types.UnionType():
            return " or ".join(_accepted(each) for each in declared.types)
        case types.EnumType():
            return ", ".join(str(each.value) for each in declared.cls)
        case types.LiteralType():
            return ", ".join(map(str, declared.values))
        case types.IntType() | types.FloatType():
            words = "a whole number" if isinstance(declared, types.IntType) else "a number"
            bounds = {">": declared.gt, ">=": declared.ge, "<": declared.lt, "<=": declared.le}
            return words + " and".join(
                f" {sign} {bound}" for sign, bound in bounds.items() if bound is not None
            )
        case types.StrType():
            length = f" of at most {declared.max_length} characters" if declared.max_length else ""
            return f"text{length}" + (f" that matches {declared.pattern}" if declared.pattern else "")
        case types.BoolType():
            return "true or false"
        case types.NoneType():
            return "null"
        case types.ListType() | types.VarTupleType() | types.TupleType():
            return "a list"
        case types.StructType() | types.DataclassType():
            return "a mapping with " + ", ".join(
                field.encode_name for field in declared.fields if field.required
            )
    return "a mapping" if isinstance(declared, types.DictType) else "another value"
