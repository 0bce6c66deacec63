"""A connection that both ends have proved a common secret on, and whose messages nobody else can write.

    hub     PROTOCOL, a random number H
    member  a random number M, its rank, HMAC(secret, "member" H M rank)
    hub     HMAC(secret, "hub" H M rank)
    then, each way: length, HMAC(key of connection and direction, number of the message, message), message

HMAC is that of RFC 2104 with SHA-256. The secret itself is never sent; a message that is changed, left out,
repeated or turned back does not pass. What is sent can be read by whoever sees the wire. Imports no torch.
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
"""Of a message."""
_LENGTH_BYTES = 4
_SECRET_FILE = "secret"

Json = Any
"""What JSON holds."""


class ForeignError(RuntimeError):
    """What came over a connection is not of this attempt."""


def make_secret(folder: Path) -> bytes:
    """A new secret in a file of `folder` that only its owner reads.

    Raises:
        PermissionError: the filesystem lets others read it.
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
    """What `make_secret` wrote.

    Raises:
        PermissionError: others than its owner could read it.
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
    """What an end shows to know the secret; `of` is `b"member"` or `b"hub"`."""
    return hmac.digest(secret, of + hub + member + struct.pack(">I", rank), "sha256")


class Sealer:
    """Seals the messages of one direction of a connection, or opens them.

    Args:
        secret: of the attempt.
        direction: `b"to hub"` or `b"from hub"`.
        hub: the random number of the hub for this connection.
        member: that of the member.
    """

    def __init__(self, secret: bytes, *, direction: bytes, hub: bytes, member: bytes) -> None:
        self._key = hmac.digest(secret, direction + hub + member, "sha256")
        self._number = 0

    def _mac(self, message: bytes) -> bytes:
        numbered = struct.pack(">QI", self._number, len(message)) + message
        self._number += 1
        return hmac.digest(self._key, numbered, "sha256")

    def seal(self, header: Json, body: bytes = b"") -> bytes:
        """The next message: JSON, and bytes beside it."""
        message = json.dumps(header).encode() + b"\n" + body
        if len(message) > MOST_BYTES:
            raise ValueError(f"a message of {len(message)} bytes is too long; accepted: {MOST_BYTES}")
        return struct.pack(">I", len(message)) + self._mac(message) + message

    def open(self, received: bytearray) -> tuple[Json, bytes] | None:
        """Take the next message from the front of what was received; None while it is not whole.

        Raises:
            ForeignError: it was not sealed by the other end.
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
