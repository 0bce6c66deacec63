"""The server at which the ranks of a run meet: a thread in rank 0's process. Imports no torch.

It holds the key-value store that communicators are made from (torch's `Store`) and the meetings by which
ranks exchange values outside of training. Each rank has one connection to it; rank 0's process has one
per rank.

Nothing that arrives is parsed before its sender has proved that it knows the attempt's secret
(`stages.comm.rendezvous.authenticated`), except the proof itself, which has a fixed size and a time limit.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from stages.comm.rendezvous import authenticated
from stages.comm.rendezvous.authenticated import ForeignError, Json, Sealer

_SECONDS_TO_PROVE = 20.0
_MOST_UNPROVED = 512
"""Unproved connections at once, beside one per rank; beyond, the oldest is dropped."""
_MOST_WARNINGS = 5
_SECONDS_TO_FINISH = 20.0
"""How long the ranks may take to leave at the end."""


@dataclass(eq=False)
class _Peer:
    """One connection."""

    socket: socket.socket
    address: str
    challenge: bytes
    """The hub's random number for this connection."""
    since: float
    """When it was accepted, by the monotonic clock."""
    rank: int | None = None
    """None until it is proved."""
    opener: Sealer | None = None
    sealer: Sealer | None = None
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


class Hub:
    """The server; it begins to serve when it is made.

    Args:
        host: address to listen on, the only one.
        size: number of ranks.
        secret: the attempt's.
    """

    def __init__(self, host: str, *, size: int, secret: bytes) -> None:
        self._size = size
        self._secret = secret
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=4096)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._unproved: dict[_Peer, None] = {}
        """In the order in which they came."""
        self._proved: set[int] = set()
        self._left: set[int] = set()
        self._store = KeyValueStore()
        self._meetings = OpenMeetings(size)
        self._warnings = 0
        self.requests = 0
        """Messages from ranks so far."""
        self._wake, self._woken = socket.socketpair()
        self._closing = False
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="rendezvous")
        self._thread.start()

    def close(self, *, failed: bool) -> None:
        """Stop serving; without a failure, wait for the other ranks to leave first."""
        deadline = time.monotonic() + (0.0 if failed else _SECONDS_TO_FINISH)
        while time.monotonic() < deadline and len(self._left) + self._meetings.gone < self._size:
            time.sleep(0.005)
        self._closing = True
        # The thread may have seen that by itself and be gone, with its end of the pair.
        with contextlib.suppress(BrokenPipeError):
            self._wake.send(b"x")
        self._thread.join()
        self._wake.close()

    def _serve(self) -> None:
        try:
            while not self._closing:
                for key, events in self._selector.select(self._seconds_to_next_deadline()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is not self._woken:
                        self._attend(key.data, events)
                self._expire()
        finally:
            for key in list(self._selector.get_map().values()):
                self._selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()

    def _accept(self) -> None:
        try:
            accepted, address = self._listener.accept()
        except OSError:
            # No free descriptor: the connection stays in the queue until others are closed.
            time.sleep(0.01)
            return
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = _Peer(accepted, str(address[0]), os.urandom(authenticated.RANDOM_BYTES), time.monotonic())
        self._unproved[peer] = None
        self._selector.register(accepted, selectors.EVENT_READ, peer)
        self._send(peer, authenticated.PROTOCOL + peer.challenge)
        if len(self._unproved) > _MOST_UNPROVED + self._size:
            self._drop(next(iter(self._unproved)), "too many others came")

    def _attend(self, peer: _Peer, events: int) -> None:
        if peer.socket.fileno() < 0:
            return  # dropped a moment ago
        if events & selectors.EVENT_WRITE:
            self._flush(peer)
        if not events & selectors.EVENT_READ or peer.socket.fileno() < 0:
            return
        try:
            read = peer.socket.recv(1 << 20 if peer.rank is not None else authenticated.PROOF_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(peer, error.strerror or "its connection broke")
            return
        if not read:
            self._drop(peer, "its process ended")
            return
        peer.received += read
        try:
            if peer.rank is None:
                self._prove(peer)
            while peer.rank is not None and (message := peer.opener.open(peer.received)):  # type: ignore[union-attr]
                self._handle(peer, *message)
        except (ForeignError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._drop(peer, str(error))

    def _prove(self, peer: _Peer) -> None:
        """Check the proof once it is complete."""
        if len(peer.received) < authenticated.PROOF_BYTES:
            return
        member = bytes(peer.received[: authenticated.RANDOM_BYTES])
        (rank,) = struct.unpack_from(">I", peer.received, authenticated.RANDOM_BYTES)
        shown = bytes(
            peer.received[authenticated.RANDOM_BYTES + authenticated.RANK_BYTES : authenticated.PROOF_BYTES]
        )
        del peer.received[: authenticated.PROOF_BYTES]
        expected = authenticated.proof(
            self._secret, of=b"member", hub=peer.challenge, member=member, rank=rank
        )
        if not hmac.compare_digest(shown, expected):
            raise ForeignError("it does not know this attempt's secret")
        if rank >= self._size or rank in self._proved or self._meetings.is_gone(rank):
            raise ForeignError(f"it says to be rank {rank}, which is here already or is none of this run's")
        del self._unproved[peer]
        peer.opener = Sealer(self._secret, direction=b"to hub", hub=peer.challenge, member=member)
        peer.sealer = Sealer(self._secret, direction=b"from hub", hub=peer.challenge, member=member)
        peer.rank = rank
        self._proved.add(rank)
        self._send(
            peer, authenticated.proof(self._secret, of=b"hub", hub=peer.challenge, member=member, rank=rank)
        )

    def _handle(self, peer: _Peer, header: Json, body: bytes) -> None:
        assert peer.rank is not None
        self.requests += 1

        def send(header: Json, body: bytes) -> None:
            if peer.socket.fileno() >= 0 and peer.sealer is not None:
                self._send(peer, peer.sealer.seal(header, body))

        request = Request(rank=peer.rank, number=int(header["id"]), header=header, body=body, send=send)
        if header["do"] in ("gather", "first"):
            self._meetings.join(request)
        elif header["do"] == "leave":
            if (reason := header["failed"]) is None:
                self._left.add(peer.rank)
            else:
                self._meetings.lose(peer.rank, f"rank {peer.rank} failed: {reason}")
            request.reply()
        else:
            self._store.handle(request)

    def _seconds_to_next_deadline(self) -> float | None:
        deadlines = [peer.since + _SECONDS_TO_PROVE for peer in self._unproved]
        if (meeting := self._meetings.next_deadline()) is not None:
            deadlines.append(meeting)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _expire(self) -> None:
        now = time.monotonic()
        for peer in [peer for peer in self._unproved if now > peer.since + _SECONDS_TO_PROVE]:
            self._drop(peer, f"it proved nothing within {_SECONDS_TO_PROVE:g} s")
        self._meetings.expire()

    def _send(self, peer: _Peer, content: bytes) -> None:
        peer.unsent += content
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        try:
            while peer.unsent:
                del peer.unsent[: peer.socket.send(peer.unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop(peer, error.strerror or "its connection broke")
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self._selector.modify(peer.socket, events, peer)

    def _drop(self, peer: _Peer, reason: str) -> None:
        if peer.socket.fileno() < 0:
            return
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.socket)
        peer.socket.close()
        self._unproved.pop(peer, None)
        if peer.rank is None:
            self._warn(f"warning: refused a connection from {peer.address}: {reason}")
            return
        if peer.rank not in self._left:
            self._meetings.lose(peer.rank, f"rank {peer.rank} is gone: {reason}")

    def _warn(self, message: str) -> None:
        self._warnings += 1
        if self._warnings <= _MOST_WARNINGS:
            print(message, file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One message of a rank, which waits for its answer."""

    rank: int
    number: int
    """Number of the request, which its answer repeats."""
    header: Json
    body: bytes
    send: Callable[[Json, bytes], None]
    """Sends a header and bytes to the rank; does nothing once its connection is closed."""

    def reply(self, result: Json = None, body: bytes = b"") -> None:
        self.send({"id": self.number, "result": result}, body)

    def fail(self, reason: str) -> None:
        """Let the rank's call raise `GoneError`."""
        self.send({"id": self.number, "error": reason}, b"")


@dataclass(frozen=True)
class _Waiting:
    """A `get` or `wait` that keys are missing for."""

    request: Request
    missing: set[str]


_OF_ONE_KEY = ("set", "append", "add", "exchange", "delete")
"""Operations on the value of the key that they name."""


class KeyValueStore:
    """Values by key. `get` and `wait` are answered once all of their keys have values."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[_Waiting]] = {}
        """By each missing key."""

    def handle(self, request: Request) -> None:
        """Answer a request, now or once its keys have values.

        Raises:
            ValueError: there is no such operation.
        """
        header, body, values = request.header, request.body, self._values
        operation = str(header["do"])
        key = str(header["key"]) if operation in _OF_ONE_KEY else ""
        result: Json = None
        match operation:
            case "get" | "wait":
                self._answer_or_wait(request)
                return
            case "set":
                values[key] = body
            case "append":
                values[key] = values.get(key, b"") + body
            case "add":
                result = int(values.get(key, b"0")) + int(header["amount"])
                values[key] = str(result).encode()
            case "exchange":
                # Write the rest of `body` if the value equals its first bytes; the value then, as hex.
                split = int(header["expected"])
                expected, desired = body[:split], body[split:]
                value = values.get(key)
                if value == expected or (value is None and not expected):
                    values[key] = value = desired
                result = (expected if value is None else value).hex()
            case "delete":
                result = values.pop(key, None) is not None
            case "check":
                result = all(each in values for each in header["keys"])
            case "count":
                result = len(values)
            case _:
                raise ValueError(f"{operation:.20} is no operation of the hub")
        request.reply(result)
        if key in values:
            self._has_value(key)

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


_MOST_NAMED = 8
"""Missing ranks that an error names."""


@dataclass
class _Meeting:
    """One meeting that ranks are still missing from."""

    kind: str
    """`gather`, or `first`: for each of several values, that of the first rank which has one."""
    to: int | None
    """Rank that gets the result; None: all."""
    deadline: float
    requests: dict[int, Request] = field(default_factory=dict)
    """By rank; the body is what the rank brought."""


class OpenMeetings:
    """The meetings that have begun and are not complete, by name.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._meetings: dict[str, _Meeting] = {}
        self._gone: dict[int, str] = {}

    @property
    def gone(self) -> int:
        """Number of ranks that will come to no further meeting."""
        return len(self._gone)

    def is_gone(self, rank: int) -> bool:
        return rank in self._gone

    def join(self, request: Request) -> None:
        """Add what a rank brings to a meeting; the last one completes it."""
        header = request.header
        name, seconds = str(header["name"]), float(header["seconds"])
        if name not in self._meetings:
            self._meetings[name] = _Meeting(str(header["do"]), header["to"], time.monotonic() + seconds)
        meeting = self._meetings[name]
        meeting.requests[request.rank] = request
        if missing := sorted(self._gone.keys() - meeting.requests.keys()):
            self._fail(name, self._gone[missing[0]])
        elif len(meeting.requests) == self._size:
            del self._meetings[name]
            self._complete(meeting)

    def _complete(self, meeting: _Meeting) -> None:
        bodies = [meeting.requests[rank].body for rank in range(self._size)]
        if meeting.kind == "first":
            values = zip(*map(json.loads, bodies), strict=True)
            first = [next((value for value in by_rank if value is not None), None) for by_rank in values]
            result = json.dumps(first).encode()
        else:
            result = b"[" + b",".join(bodies) + b"]"
        for request in meeting.requests.values():
            request.reply(None, result if meeting.to in (None, request.rank) else b"null")

    def lose(self, rank: int, reason: str) -> None:
        """Fail all meetings, now and later, that this rank has not joined."""
        self._gone.setdefault(rank, reason)
        for name in [name for name, meeting in self._meetings.items() if rank not in meeting.requests]:
            self._fail(name, self._gone[rank])

    def next_deadline(self) -> float | None:
        """When the next meeting expires, by the monotonic clock."""
        return min((meeting.deadline for meeting in self._meetings.values()), default=None)

    def expire(self) -> None:
        """Fail the meetings whose deadline has passed."""
        now = time.monotonic()
        for name in [name for name, meeting in self._meetings.items() if now > meeting.deadline]:
            if (meeting := self._meetings.get(name)) is None:
                continue  # an answer to another meeting failed meanwhile
            missing = sorted(set(range(self._size)) - meeting.requests.keys())
            some = ", ".join(map(str, missing[:_MOST_NAMED])) + (
                ", ..." if len(missing) > _MOST_NAMED else ""
            )
            self._fail(name, f"waited too long for rank {some}")

    def _fail(self, name: str, reason: str) -> None:
        meeting = self._meetings.pop(name, None)
        for request in meeting.requests.values() if meeting is not None else ():
            request.fail(reason)
