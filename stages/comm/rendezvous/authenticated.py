"""Mutual authentication of a connection by a shared secret, and a MAC for every message on it.

    hub     PROTOCOL, a random number H
    member  a random number M, its rank, HMAC(secret, "member" H M rank)
    hub     HMAC(secret, "hub" H M rank)
    then, each way: length, HMAC(key of connection and direction, number of the message, message), message

HMAC as in RFC 2104, with SHA-256. The secret itself is never sent. A message that is changed, dropped,
repeated or reflected is rejected. Messages are not encrypted. Imports no torch.
"""

from __future__ import annotations

import hmac
import json
import os
import struct
from pathlib import Path
from typing import Any

PROTOCOL = b"asyncpp rendezvous 1\n"
RANDOM_BYTES = 32
MAC_BYTES = 32
RANK_BYTES = 4
GREETING_BYTES = len(PROTOCOL) + RANDOM_BYTES
PROOF_BYTES = RANDOM_BYTES + RANK_BYTES + MAC_BYTES
MOST_BYTES = 1 << 30
"""Maximal size of a message."""
_LENGTH_BYTES = 4
_SECRET_FILE = "secret"

Json = Any
"""A value that JSON can represent."""


class ForeignError(RuntimeError):
    """Data on a connection does not come from a process of this attempt."""


def make_secret(folder: Path) -> bytes:
    """Write a new secret to a file in `folder` that only its owner can read.

    Raises:
        PermissionError: the filesystem does not keep the file's mode, so others could read it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{_SECRET_FILE}.writing"
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        _check_private(descriptor, unfinished)
        secret = os.urandom(32)
        os.write(descriptor, secret.hex().encode())
    finally:
        os.close(descriptor)
    unfinished.replace(folder / _SECRET_FILE)
    return secret


def read_secret(folder: Path) -> bytes:
    """The secret that `make_secret` wrote.

    Raises:
        PermissionError: others than its owner can read it.
    """
    file = folder / _SECRET_FILE
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        _check_private(descriptor, file)
        return bytes.fromhex(os.read(descriptor, 1024).decode("ascii"))
    finally:
        os.close(descriptor)


def _check_private(descriptor: int, file: Path) -> None:
    mode = os.fstat(descriptor).st_mode & 0o777
    if mode & 0o077:
        raise PermissionError(
            f"{file} must be readable by its owner alone, and has mode {mode:o}: the processes of a run "
            "prove by it that they belong together; put the experiment on a filesystem that keeps permissions"
        )


def proof(secret: bytes, *, of: bytes, hub: bytes, member: bytes, rank: int) -> bytes:
    """An end's proof that it knows the secret; `of` is `b"member"` or `b"hub"`."""
    return hmac.digest(secret, of + hub + member + struct.pack(">I", rank), "sha256")


class Sealer:
    """Adds MACs to the messages of one direction of a connection, or checks them.

    Args:
        secret: the attempt's.
        direction: `b"to hub"` or `b"from hub"`.
        hub: the hub's random number for this connection.
        member: the member's.
    """

    def __init__(self, secret: bytes, *, direction: bytes, hub: bytes, member: bytes) -> None:
        self._key = hmac.digest(secret, direction + hub + member, "sha256")
        self._number = 0

    def _mac(self, message: bytes) -> bytes:
        numbered = struct.pack(">QI", self._number, len(message)) + message
        self._number += 1
        return hmac.digest(self._key, numbered, "sha256")

    def seal(self, header: Json, body: bytes = b"") -> bytes:
        """The next message, of a JSON header and bytes, with its MAC."""
        message = json.dumps(header).encode() + b"\n" + body
        if len(message) > MOST_BYTES:
            raise ValueError(f"a message of {len(message)} bytes is too long; accepted: {MOST_BYTES}")
        return struct.pack(">I", len(message)) + self._mac(message) + message

    def open(self, received: bytearray) -> tuple[Json, bytes] | None:
        """Remove the next message from the front of `received`; None while it is incomplete.

        Raises:
            ForeignError: its MAC is not the other end's.
        """
        start = _LENGTH_BYTES + MAC_BYTES
        if len(received) < start:
            return None
        (length,) = struct.unpack_from(">I", received)
        if length > MOST_BYTES:
            raise ForeignError("a message is longer than any of ours")
        if len(received) < start + length:
            return None
        mac, message = bytes(received[_LENGTH_BYTES:start]), bytes(received[start : start + length])
        if not hmac.compare_digest(mac, self._mac(message)):
            raise ForeignError("a message was not sealed with this attempt's secret")
        del received[: start + length]
        header, _, body = message.partition(b"\n")
        return json.loads(header), body
