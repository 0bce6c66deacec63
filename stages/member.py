"""A process's connection to the hub of its run, and the two things that go over it: torch's store, and what
the ranks tell each other."""

from __future__ import annotations

import contextlib
import datetime
import hmac
import itertools
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence

from torch._C._distributed_c10d import Store

from stages import authenticated
from stages.authenticated import ForeignError, Json, Sealer

_SECONDS_BETWEEN_TRIES = 0.2
_SLACK = 10.0
"""Seconds that the hub's answer to a meeting that failed may be late."""


class GoneError(RuntimeError):
    """Another process of the run did not come, or ended: the reason of its end is the one to look for."""


class Member:
    """The connection of one rank. Any thread may use it.

    Args:
        host: of the hub.
        port: likewise.
        rank: of this process.
        secret: of the attempt.
        timeout: seconds to connect.

    Raises:
        ForeignError: who listens there is not this attempt's hub.
        GoneError: nobody there takes this process for one of the run's.
    """

    def __init__(self, host: str, port: int, *, rank: int, secret: bytes, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._socket = socket.create_connection((host, port), timeout=timeout)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                hub, member = self._prove(rank, secret)
                break
            except OSError as error:
                # Where very many come at once some are turned away.
                if time.monotonic() + _SECONDS_BETWEEN_TRIES > deadline:
                    raise GoneError(
                        f"rank 0 at {host}:{port} did not take this process for one of its run within "
                        f"{timeout:g} s ({error})"
                    ) from error
                time.sleep(_SECONDS_BETWEEN_TRIES)
        self._socket.settimeout(None)
        self._sealer = Sealer(secret, direction=b"to hub", hub=hub, member=member)
        self._opener = Sealer(secret, direction=b"from hub", hub=hub, member=member)
        self._ids = itertools.count()
        self._sending = threading.Lock()
        self._arrived = threading.Condition()
        self._expected: set[int] = set()
        self._answers: dict[int, tuple[Json, bytes]] = {}
        self._broken: str | None = None
        self._thread = threading.Thread(target=self._listen, daemon=True, name="rendezvous-answers")
        self._thread.start()

    def _prove(self, rank: int, secret: bytes) -> tuple[bytes, bytes]:
        try:
            return self._prove_over(self._socket, rank, secret)
        except BaseException:
            self._socket.close()
            raise

    def _prove_over(self, connection: socket.socket, rank: int, secret: bytes) -> tuple[bytes, bytes]:
        greeting = _exactly(connection, authenticated.GREETING_BYTES)
        if not greeting.startswith(authenticated.PROTOCOL):
            raise ForeignError("what listens at the address of rank 0 is not a process of this run")
        hub, member = greeting[len(authenticated.PROTOCOL) :], os.urandom(authenticated.RANDOM_BYTES)
        mine = authenticated.proof(secret, of=b"member", hub=hub, member=member, rank=rank)
        connection.sendall(member + struct.pack(">I", rank) + mine)
        expected = authenticated.proof(secret, of=b"hub", hub=hub, member=member, rank=rank)
        if not hmac.compare_digest(_exactly(connection, authenticated.MAC_BYTES), expected):
            raise ForeignError("what listens at the address of rank 0 does not know this attempt's secret")
        return hub, member

    def _listen(self) -> None:
        received = bytearray()
        reason = "its process ended"
        try:
            while read := self._socket.recv(1 << 20):
                received += read
                while (message := self._opener.open(received)) is not None:
                    with self._arrived:
                        if message[0]["id"] in self._expected:
                            self._answers[message[0]["id"]] = message
                            self._arrived.notify_all()
        except (OSError, ForeignError, ValueError, KeyError) as error:
            reason = str(error)
        with self._arrived:
            self._broken = f"rank 0 is gone: {reason}"
            self._arrived.notify_all()

    def ask(self, header: dict[str, Json], body: bytes = b"", *, timeout: float) -> tuple[Json, bytes]:
        """Send a request; its result, and bytes beside it.

        Raises:
            GoneError: the hub is gone, or says that what is asked for cannot be had.
            TimeoutError: no answer came in time.
        """
        request = next(self._ids)
        with self._arrived:
            self._expected.add(request)
        try:
            with self._sending:
                self._socket.sendall(self._sealer.seal({"id": request, **header}, body))
        except OSError as error:
            raise GoneError(self._broken or f"rank 0 is gone: {error.strerror}") from error
        with self._arrived:
            came = self._arrived.wait_for(lambda: request in self._answers or self._broken, timeout)
            self._expected.discard(request)
            answer = self._answers.pop(request, None)
            if answer is None:
                if came:
                    raise GoneError(self._broken)
                raise TimeoutError(f"rank 0 gave no answer within {timeout:g} s")
        if "error" in answer[0]:
            raise GoneError(answer[0]["error"])
        return answer[0]["result"], answer[1]

    def close(self, *, failure: str | None) -> None:
        """Leave.

        Args:
            failure: why, if not since the run is over: the others are told.
        """
        with contextlib.suppress(GoneError, TimeoutError):
            self.ask({"do": "leave", "failed": failure}, timeout=_SLACK)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(_SLACK)
        self._socket.close()


class Meetings:
    """What the ranks tell each other, one after another: all come to the same meetings in the same order.

    Two threads must not share one: what the ranks meet for could differ from rank to rank.

    Args:
        member: this process's.
        name: of these meetings, which no others of the run have.
        seconds: that a meeting waits for its last rank.
    """

    def __init__(self, member: Member, name: str, *, seconds: float) -> None:
        self._member = member
        self._name = name
        self._seconds = seconds
        self._numbers = itertools.count()

    def gather(self, mine: Json, *, to: int | None = None, seconds: float | None = None) -> list[Json]:
        """What every rank brought, in the order of the ranks.

        Args:
            mine: what this one brings.
            to: the rank that gets it; the others get nothing, an empty list. None: all do, so it must be
                little.
            seconds: that this meeting waits, if not as long as the others.
        """
        return self._meet("gather", mine, to=to, seconds=seconds) or []

    def first(self, *mine: Json, seconds: float | None = None) -> list[Json]:
        """Of each of several values, that of the first rank for which it is not None."""
        return list(self._meet("first", list(mine), to=None, seconds=seconds))

    def _meet(self, kind: str, mine: Json, *, to: int | None, seconds: float | None) -> Json:
        limit = self._seconds if seconds is None else seconds
        name = f"{self._name} {next(self._numbers)}"
        header = {"do": kind, "name": name, "to": to, "seconds": limit}
        try:
            _, content = self._member.ask(header, json.dumps(mine).encode(), timeout=limit + _SLACK)
        except TimeoutError as error:
            raise GoneError(str(error)) from error
        return json.loads(content)


class HubStore(Store):
    """torch's store of values by key, kept by the hub; what gloo and NCCL find each other's addresses by.

    Args:
        member: this process's connection.
        timeout: for a value to come, unless one is named.
    """

    def __init__(self, member: Member, *, timeout: datetime.timedelta) -> None:
        super().__init__()
        self._member = member
        self._seconds = timeout.total_seconds()

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", _bytes(value), key=key)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        lengths, content = self._ask_for("get", list(keys), self._seconds)
        ends = list(itertools.accumulate(lengths))
        return [content[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        self._ask_for("wait", list(keys), self._seconds if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", keys=list(keys)))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key=key, amount=amount))

    def append(self, key: str, value: bytes | str) -> None:
        self._ask("append", _bytes(value), key=key)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        before, after = _bytes(expected), _bytes(desired)
        return bytes.fromhex(self._ask("exchange", before + after, key=key, expected=len(before)))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key=key))

    def num_keys(self) -> int:
        return int(self._ask("count"))

    def has_extended_api(self) -> bool:
        return True

    def _ask(self, what: str, body: bytes = b"", **header: Json) -> Json:
        return self._member.ask({"do": what, **header}, body, timeout=self._seconds)[0]

    def _ask_for(self, what: str, keys: list[str], seconds: float) -> tuple[Json, bytes]:
        began = time.monotonic()
        try:
            return self._member.ask({"do": what, "keys": keys}, timeout=seconds)
        except TimeoutError as error:
            waited = time.monotonic() - began
            raise GoneError(f"a process of the run did not connect within {waited:.0f} s") from error


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _exactly(connection: socket.socket, count: int) -> bytes:
    read = b""
    while len(read) < count:
        more = connection.recv(count - len(read))
        if not more:
            raise ConnectionResetError("it closed the connection")
        read += more
    return read
