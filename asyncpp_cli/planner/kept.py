"""Keeps facts on disk that take long to find and are the same for many plans: of programs, their steps under
given times, what ranks hold, and cuts.

One file of the cache folder holds those that one version of the code has found; another version finds its
own. It is read as a whole and replaced as a whole, so any filesystem will do, and of two plans at a time one
may lose what it has found. A damaged file counts as none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache, wraps
from pathlib import Path
from typing import ParamSpec, TypeVar, cast, get_type_hints

import msgspec

import optimizers
import schedules
import stages
from asyncpp_cli.base.atomic_files import write_bytes
from asyncpp_cli.base.errors import UserError
from stages.data.dataset import cache_folder

LARGEST = 2**25
"""Bytes of a file; the facts that were found first go."""
VERSIONS = 4
"""Files that stay; those that were written first go."""

_DIGEST = hashlib.sha256
_DIGEST_BYTES = 32

Given = ParamSpec("Given")
Found = TypeVar("Found")


class _Facts:
    """Facts by key, as they are encoded."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.known = _read(file)
        self.new: dict[bytes, bytes] = {}

    def fact(self, key: bytes, kind: type[Found], find: Callable[[], Found]) -> Found:
        if (encoded := self.known.get(key)) is not None:
            with suppress(msgspec.DecodeError):
                return msgspec.msgpack.decode(encoded, type=kind)
        found = find()
        self.known[key] = self.new[key] = msgspec.msgpack.encode(found)
        return found

    def write(self) -> None:
        """Add what is new to the file; without a folder that can be written, nothing."""
        if not self.new:
            return
        facts = _read(self.file) | self.new
        sizes = sum(map(len, facts.values()))
        for key in list(facts):
            if sizes <= LARGEST:
                break
            sizes -= len(facts.pop(key))
        content = msgspec.msgpack.encode(facts)
        with suppress(OSError, UserError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self.file, _DIGEST(content).digest() + content)
            files = sorted(self.file.parent.glob(_name("*")), key=lambda file: -file.stat().st_mtime)
            for file in files[VERSIONS:]:
                file.unlink(missing_ok=True)


def _read(file: Path) -> dict[bytes, bytes]:
    with suppress(OSError, msgspec.DecodeError):
        content = file.read_bytes()
        digest, facts = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if _DIGEST(facts).digest() == digest:
            return msgspec.msgpack.decode(facts, type=dict[bytes, bytes])
    return {}


_open: list[_Facts] = []


@contextmanager
def keeping() -> Iterator[None]:
    """Within it, functions that are `kept` look on disk before they compute, and what they find is written at
    the end."""
    folder = cache_folder()
    if _open or folder is None:
        yield
        return
    own = (*optimizers.__path__, *schedules.__path__, *stages.__path__, str(Path(__file__).parent))
    _open.append(_Facts(folder / _name(_version_of(map(Path, own)))))
    try:
        yield
    finally:
        _open.pop().write()


def kept(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """A function that is computed once for its arguments: its results are remembered, and on disk within
    `keeping`. Arguments are told apart by their `repr`; the result is of the type that is annotated."""
    kind = cache(lambda: get_type_hints(function)["return"])

    @wraps(function)
    def found(*given: Given.args, **named: Given.kwargs) -> Found:
        if not _open:
            return function(*given, **named)
        text = repr((function.__module__, function.__qualname__, given, named))
        key = hashlib.blake2b(text.encode(), digest_size=16).digest()
        fact: Found = _open[0].fact(key, kind(), lambda: function(*given, **named))
        return fact

    return cast(Callable[Given, Found], lru_cache(maxsize=4096)(found))


def _name(version: str) -> str:
    return f"plans-{version}.facts"


def _version_of(packages: Iterable[Path]) -> str:
    """A digest of their code, all that facts may depend on."""
    digest = _DIGEST()
    for package in packages:
        for file in sorted(package.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
