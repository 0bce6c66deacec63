"""A rank's connection to the hub, and what uses it: torch's key-value store and the meetings of the ranks."""

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

from stages.comm.rendezvous import authenticated
from stages.comm.rendezvous.authenticated import ForeignError, Json, Sealer

_SECONDS_BETWEEN_TRIES = 0.2
_SLACK = 10.0
"""Seconds by which the hub's answer to a failed meeting may be late."""


class GoneError(RuntimeError):
    """Another process of the run did not join, or has ended; its own error is the cause to look for."""


class Member:
    """The connection of one rank to the hub; safe to use from any thread.

    Args:
        host: of the hub.
        port: of the hub.
        rank: of this process.
        secret: the attempt's.
        timeout: seconds to connect.

    Raises:
        ForeignError: what listens there is not this attempt's hub.
        GoneError: no hub accepted this process within `timeout`.
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
                # With very many at once the hub turns some away.
                if time.monotonic() + _SECONDS_BETWEEN_TRIES > deadline:
                    raise GoneError(
                        f"rank 0 at {host}:{port} did not take this process for one of its run within "
                        f"{timeout:g} s ({error})"
                    ) from error
                time.sleep(_SECONDS_BETWEEN_TRIES)
        self._socket.settimeout(None)
        self._sealer = Sealer(secret, direction=b"to hub", hub=hub, member=member)
        self._opener = Sealer(secret, direction=b"from hub", hub=hub, member=member)
        self.requests = 0
        """Messages sent to the hub so far."""
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
        proof = authenticated.proof(secret, of=b"member", hub=hub, member=member, rank=rank)
        connection.sendall(member + struct.pack(">I", rank) + proof)
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
        """Send a request; returns its result and the bytes that came with it.

        Raises:
            GoneError: the hub is gone, or cannot answer since another rank is.
            TimeoutError: no answer came within `timeout` seconds.
        """
        with self._arrived:
            request = self.requests
            self.requests += 1
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
        """Leave the run.

        Args:
            failure: reason to tell the other ranks; None after a normal end.
        """
        with contextlib.suppress(GoneError, TimeoutError):
            self.ask({"do": "leave", "failed": failure}, timeout=_SLACK)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(_SLACK)
        self._socket.close()


class Meetings:
    """Exchanges of small values between all ranks, through the hub. All ranks take part in the same order.

    Each thread needs its own, or the order could differ between ranks.

    Args:
        member: this process's connection.
        name: of these meetings, unique in the run.
        seconds: how long a meeting waits for its last rank.
    """

    def __init__(self, member: Member, name: str, *, seconds: float) -> None:
        self._member = member
        self._name = name
        self._seconds = seconds
        self._numbers = itertools.count()

    def gather(self, value: Json, *, to: int | None = None, seconds: float | None = None) -> list[Json]:
        """The values of all ranks, in rank order.

        Args:
            value: this rank's.
            to: the rank that gets them; the others get an empty list. None: all ranks, so values must be
                small.
            seconds: how long this meeting waits, if not as long as the others.
        """
        return self._meet("gather", value, to=to, seconds=seconds) or []

    def first(self, *values: Json) -> list[Json]:
        """For each of several values, that of the first rank where it is not None."""
        return list(self._meet("first", list(values)))

    def _meet(self, kind: str, value: Json, *, to: int | None = None, seconds: float | None = None) -> Json:
        limit = self._seconds if seconds is None else seconds
        name = f"{self._name} {next(self._numbers)}"
        header = {"do": kind, "name": name, "to": to, "seconds": limit}
        try:
            _, content = self._member.ask(header, json.dumps(value).encode(), timeout=limit + _SLACK)
        except TimeoutError as error:
            raise GoneError(str(error)) from error
        return json.loads(content)


class HubStore(Store):
    """torch's key-value store, held by the hub, by which gloo and NCCL exchange addresses.

    Args:
        member: this process's connection.
        timeout: how long to wait for a value, unless a call names another.
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
        return self._get_values(keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        self._ask_for("wait", keys, self._seconds if timeout is None else timeout.total_seconds())

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

    # Torch's C++ calls some methods by other names than Python does.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def clone(self) -> HubStore:
        """This store: requests of several threads do not disturb each other."""
        return self

    def has_extended_api(self) -> bool:
        return True

    def _ask(self, what: str, body: bytes = b"", **header: Json) -> Json:
        return self._member.ask({"do": what, **header}, body, timeout=self._seconds)[0]

    def _get_values(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> list[bytes]:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        lengths, content = self._ask_for("get", keys, seconds)
        ends = list(itertools.accumulate(lengths))
        return [content[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def _ask_for(self, what: str, keys: Sequence[str], seconds: float) -> tuple[Json, bytes]:
        began = time.monotonic()
        try:
            return self._member.ask({"do": what, "keys": list(keys)}, timeout=seconds)
        except TimeoutError as error:
            waited = time.monotonic() - began
            raise GoneError(f"a process of the run did not connect within {waited:.0f} s") from error


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        more = connection.recv(count - len(received))
        if not more:
            raise ConnectionResetError("it closed the connection")
        received += more
    return received


class GroupStore(HubStore):
    """Keys under the name of one communicator, whose members each set the key `.../RANK` once.

    One request to the hub gets the addresses of all members. gloo asks for every peer's address by itself,
    twice, when it first connects to it: of n members that would be about 2n requests each.

    Args:
        member: this process's connection to the hub.
        timeout: for a value to come, unless a call names one.
        name: of the communicator, unique in the run.
        size: members of it.
    """

    def __init__(self, member: Member, *, timeout: datetime.timedelta, name: str, size: int) -> None:
        super().__init__(member, timeout=timeout)
        self._name = name
        self._size = size
        self._cached: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        super().set(key, value)
        self._cached[key] = value.encode() if isinstance(value, str) else bytes(value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return [self._cached[key] for key in keys]

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        missing = {member: None for key in keys for member in self._keys_of_members(key)}
        wanted = [key for key in missing if key not in self._cached]
        if wanted:
            self._cached.update(zip(wanted, self._get_values(wanted, timeout), strict=True))

    def _keys_of_members(self, key: str) -> list[str]:
        """A member's key for all members; any other key alone."""
        head, _, rank = key.rpartition("/")
        if not head or not rank.isdigit() or int(rank) >= self._size:
            return [key]
        return [f"{head}/{member}" for member in range(self._size)]

    def _ask(self, what: str, body: bytes = b"", **header: Json) -> Json:
        if "key" in header:
            header["key"] = f"{self._name}/{header['key']}"
        if "keys" in header:
            header["keys"] = [f"{self._name}/{key}" for key in header["keys"]]
        return super()._ask(what, body, **header)

    def _ask_for(self, what: str, keys: Sequence[str], seconds: float) -> tuple[Json, bytes]:
        return super()._ask_for(what, [f"{self._name}/{key}" for key in keys], seconds)
