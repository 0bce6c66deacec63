"""A rank's request to the hub. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stages.comm.rendezvous.authenticated import Json


@dataclass(frozen=True, kw_only=True)
class Request:
    """One message of a rank, which waits for its answer."""

    rank: int
    number: int
    """Of the request, which its answer repeats."""
    header: Json
    body: bytes
    send: Callable[[Json, bytes], None]
    """Sends a header and bytes to the rank; does nothing once its connection is closed."""

    def reply(self, result: Json = None, body: bytes = b"") -> None:
        self.send({"id": self.number, "result": result}, body)

    def fail(self, reason: str) -> None:
        """Let the rank's call raise `GoneError`."""
        self.send({"id": self.number, "error": reason}, b"")
