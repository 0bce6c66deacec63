"""The hub's key-value store, from which communicators are made (torch's `Store`). Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stages.comm.rendezvous.authenticated import Json
from stages.comm.rendezvous.request import Request


@dataclass(frozen=True)
class _Waiting:
    """A `get` or `wait` that keys are missing for."""

    request: Request
    missing: set[str]


class KeyValueStore:
    """Values by key. `get` and `wait` are answered once all of their keys have values."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[_Waiting]] = {}
        """By each missing key."""
        self._operations: dict[str, Callable[[Json, bytes], Json]] = {
            "set": self._set,
            "append": self._append,
            "add": self._add,
            "exchange": self._exchange,
            "delete": self._delete,
            "check": self._check,
            "count": self._count,
        }

    def handle(self, request: Request) -> None:
        """Answer a request, now or once its keys have values.

        Raises:
            ValueError: there is no such operation.
        """
        operation = str(request.header["do"])
        if operation in ("get", "wait"):
            self._answer_or_wait(request)
        elif operation in self._operations:
            request.reply(self._operations[operation](request.header, request.body))
            if (key := request.header.get("key")) in self._values:
                self._has_value(key)
        else:
            raise ValueError(f"{operation:.20} is no operation of the hub")

    def _answer_or_wait(self, request: Request) -> None:
        keys = [str(key) for key in request.header["keys"]]
        if missing := {key for key in keys if key not in self._values}:
            waiting = _Waiting(request, missing)
            for key in missing:
                self._waiting.setdefault(key, []).append(waiting)
        elif request.header["do"] == "get":
            values = [self._values[key] for key in keys]
            request.reply([len(value) for value in values], b"".join(values))
        else:
            request.reply()

    def _has_value(self, key: str) -> None:
        for waiting in self._waiting.pop(key, ()):
            waiting.missing.discard(key)
            if not waiting.missing:
                self._answer_or_wait(waiting.request)  # another key may have been deleted meanwhile

    def _set(self, header: Json, body: bytes) -> Json:
        self._values[header["key"]] = body
        return None

    def _append(self, header: Json, body: bytes) -> Json:
        self._values[header["key"]] = self._values.get(header["key"], b"") + body
        return None

    def _add(self, header: Json, _body: bytes) -> Json:
        total = int(self._values.get(header["key"], b"0")) + int(header["amount"])
        self._values[header["key"]] = str(total).encode()
        return total

    def _exchange(self, header: Json, body: bytes) -> Json:
        """Write the rest of `body` if the value equals its first `expected` bytes; the value then, as hex."""
        key, split = header["key"], int(header["expected"])
        expected, desired = body[:split], body[split:]
        value = self._values.get(key)
        if value == expected or (value is None and not expected):
            self._values[key] = value = desired
        return (expected if value is None else value).hex()

    def _delete(self, header: Json, _body: bytes) -> Json:
        return self._values.pop(header["key"], None) is not None

    def _check(self, header: Json, _body: bytes) -> Json:
        return all(key in self._values for key in header["keys"])

    def _count(self, _header: Json, _body: bytes) -> Json:
        return len(self._values)
