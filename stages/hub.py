"""Where the processes of a run meet: a server in a thread of rank 0's process. Imports no torch.

It keeps what communicators are made from (a store of values by key), and brings together what the ranks have
to say to each other outside of training: each rank sends its part here, and gets what it needs. So every rank
has one connection, and rank 0 one a rank.

Nothing that arrives is looked at before its sender has proved the attempt's secret (`stages.authenticated`),
but for the proof itself, which has a fixed size and a time limit.
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

from stages import authenticated
from stages.authenticated import ForeignError, Json, Sealer

_SECONDS_TO_PROVE = 20.0
_MOST_UNPROVED = 512
"""Connections at once, beside one a rank, that have proved nothing; the oldest are dropped beyond."""
_MOST_COMPLAINTS = 5
_SECONDS_TO_FINISH = 20.0
"""How long the members may take to leave at the end."""


@dataclass(eq=False)
class _Peer:
    """One connection."""

    socket: socket.socket
    address: str
    hub: bytes
    since: float
    rank: int | None = None
    """Once it is proved."""
    opener: Sealer | None = None
    sealer: Sealer | None = None
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


@dataclass
class _Meeting:
    """What the ranks brought to one meeting so far."""

    kind: str
    """`gather`, or `first`: of each of several values, that of the first rank which has one."""
    to: int | None
    deadline: float
    brought: dict[int, bytes] = field(default_factory=dict)
    waiting: list[tuple[_Peer, int]] = field(default_factory=list)


class Hub:
    """The server.

    Args:
        host: address that it listens on, and on no other.
        size: number of ranks.
        secret: of the attempt.
    """

    def __init__(self, host: str, *, size: int, secret: bytes) -> None:
        self._size = size
        self._secret = secret
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=4096)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}
        self._unproved: dict[_Peer, None] = {}
        self._left: set[int] = set()
        self._gone: dict[int, str] = {}
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[_Peer, int, str, list[str]]] = []
        self._meetings: dict[str, _Meeting] = {}
        self._complaints = 0
        self.requests = 0
        """Messages from members so far."""
        self._wake, self._woken = socket.socketpair()
        self._closing = False
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="rendezvous")
        self._thread.start()

    def close(self, *, failed: bool) -> None:
        """End; without a failure the other members may leave first."""
        deadline = time.monotonic() + (0.0 if failed else _SECONDS_TO_FINISH)
        while time.monotonic() < deadline and len(self._left) + len(self._gone) < self._size:
            time.sleep(0.005)
        self._closing = True
        self._wake.send(b"x")
        self._thread.join()

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
            self._wake.close()
            self._selector.close()

    def _accept(self) -> None:
        try:
            accepted, address = self._listener.accept()
        except OSError:
            # Without a free descriptor it stays in the queue; others may be closed meanwhile.
            time.sleep(0.01)
            return
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = _Peer(accepted, str(address[0]), os.urandom(authenticated.RANDOM_BYTES), time.monotonic())
        self._unproved[peer] = None
        self._selector.register(accepted, selectors.EVENT_READ, peer)
        self._send(peer, authenticated.PROTOCOL + peer.hub)
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
                self._answer(peer, *message)
        except (ForeignError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._drop(peer, str(error))

    def _prove(self, peer: _Peer) -> None:
        """Take the member for one of ours, once it has proved it."""
        if len(peer.received) < authenticated.PROOF_BYTES:
            return
        member = bytes(peer.received[: authenticated.RANDOM_BYTES])
        (rank,) = struct.unpack_from(">I", peer.received, authenticated.RANDOM_BYTES)
        shown = bytes(
            peer.received[authenticated.RANDOM_BYTES + authenticated.RANK_BYTES : authenticated.PROOF_BYTES]
        )
        del peer.received[: authenticated.PROOF_BYTES]
        expected = authenticated.proof(self._secret, of=b"member", hub=peer.hub, member=member, rank=rank)
        if not hmac.compare_digest(shown, expected):
            raise ForeignError("it does not know this attempt's secret")
        if rank >= self._size or rank in self._peers or rank in self._gone:
            raise ForeignError(f"it says to be rank {rank}, which is here already or is none of this run's")
        del self._unproved[peer]
        peer.opener = Sealer(self._secret, direction=b"to hub", hub=peer.hub, member=member)
        peer.sealer = Sealer(self._secret, direction=b"from hub", hub=peer.hub, member=member)
        peer.rank = rank
        self._peers[rank] = peer
        self._send(peer, authenticated.proof(self._secret, of=b"hub", hub=peer.hub, member=member, rank=rank))

    def _answer(self, peer: _Peer, header: Json, body: bytes) -> None:
        self.requests += 1
        request, what = int(header["id"]), str(header["do"])
        if what in ("gather", "first"):
            self._meet(peer, request, header, body)
        elif what in ("get", "wait"):
            self._waiting.append((peer, request, what, [str(key) for key in header["keys"]]))
            self._serve_waiting()
        elif what == "leave":
            assert peer.rank is not None
            if (reason := header["failed"]) is None:
                self._left.add(peer.rank)
            else:
                self._lose(peer.rank, f"rank {peer.rank} failed: {reason}")
            self._reply(peer, request)
        else:
            change: Callable[[Json, bytes], Json] = getattr(self, f"_{what}_value")
            self._reply(peer, request, change(header, body))
            self._serve_waiting()

    def _set_value(self, header: Json, body: bytes) -> Json:
        self._values[header["key"]] = body
        return None

    def _append_value(self, header: Json, body: bytes) -> Json:
        self._values[header["key"]] = self._values.get(header["key"], b"") + body
        return None

    def _add_value(self, header: Json, _body: bytes) -> Json:
        total = int(self._values.get(header["key"], b"0")) + int(header["amount"])
        self._values[header["key"]] = str(total).encode()
        return total

    def _exchange_value(self, header: Json, body: bytes) -> Json:
        """Write the rest of `body` if the value is its first `expected` bytes; the value then, as hex."""
        key, split = header["key"], int(header["expected"])
        expected, desired = body[:split], body[split:]
        there = self._values.get(key)
        if there == expected or (there is None and not expected):
            self._values[key] = there = desired
        return (expected if there is None else there).hex()

    def _delete_value(self, header: Json, _body: bytes) -> Json:
        return self._values.pop(header["key"], None) is not None

    def _check_value(self, header: Json, _body: bytes) -> Json:
        return all(key in self._values for key in header["keys"])

    def _count_value(self, _header: Json, _body: bytes) -> Json:
        return len(self._values)

    def _serve_waiting(self) -> None:
        left = []
        for peer, request, what, keys in self._waiting:
            if not all(key in self._values for key in keys):
                left.append((peer, request, what, keys))
            elif what == "get":
                values = [self._values[key] for key in keys]
                self._reply(peer, request, [len(value) for value in values], b"".join(values))
            else:
                self._reply(peer, request)
        self._waiting = left

    def _meet(self, peer: _Peer, request: int, header: Json, body: bytes) -> None:
        assert peer.rank is not None
        name, seconds = str(header["name"]), float(header["seconds"])
        if name not in self._meetings:
            self._meetings[name] = _Meeting(header["do"], header["to"], time.monotonic() + seconds)
        meeting = self._meetings[name]
        meeting.brought[peer.rank] = body
        meeting.waiting.append((peer, request))
        if missing := sorted(self._gone.keys() - meeting.brought.keys()):
            self._break(name, self._gone[missing[0]])
        elif len(meeting.brought) == self._size:
            del self._meetings[name]
            self._conclude(meeting)

    def _conclude(self, meeting: _Meeting) -> None:
        in_order = [meeting.brought[rank] for rank in range(self._size)]
        if meeting.kind == "first":
            values = zip(*map(json.loads, in_order), strict=True)
            first = [next((value for value in of_ranks if value is not None), None) for of_ranks in values]
            all_of_it = json.dumps(first).encode()
        else:
            all_of_it = b"[" + b",".join(in_order) + b"]"
        for peer, request in meeting.waiting:
            self._reply(peer, request, None, all_of_it if meeting.to in (None, peer.rank) else b"null")

    def _break(self, name: str, reason: str) -> None:
        meeting = self._meetings.pop(name, None)
        for peer, request in meeting.waiting if meeting is not None else ():
            self._send_sealed(peer, {"id": request, "error": reason})

    def _lose(self, rank: int, reason: str) -> None:
        """A rank will not come to any meeting any more."""
        self._gone.setdefault(rank, reason)
        for name in [name for name, meeting in self._meetings.items() if rank not in meeting.brought]:
            self._break(name, self._gone[rank])

    def _seconds_to_next_deadline(self) -> float | None:
        deadlines = [meeting.deadline for meeting in self._meetings.values()]
        deadlines += [peer.since + _SECONDS_TO_PROVE for peer in self._unproved]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _expire(self) -> None:
        now = time.monotonic()
        for peer in [peer for peer in self._unproved if now > peer.since + _SECONDS_TO_PROVE]:
            self._drop(peer, f"it proved nothing within {_SECONDS_TO_PROVE:g} s")
        for name in [name for name, meeting in self._meetings.items() if now > meeting.deadline]:
            missing = sorted(set(range(self._size)) - self._meetings[name].brought.keys())
            some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            self._break(name, f"waited too long for rank {some}")

    def _reply(self, peer: _Peer, request: int, result: Json = None, body: bytes = b"") -> None:
        self._send_sealed(peer, {"id": request, "result": result}, body)

    def _send_sealed(self, peer: _Peer, header: Json, body: bytes = b"") -> None:
        if peer.socket.fileno() >= 0 and peer.sealer is not None:
            self._send(peer, peer.sealer.seal(header, body))

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
        self._waiting = [waiting for waiting in self._waiting if waiting[0] is not peer]
        if peer.rank is None:
            self._complain(f"warning: refused a connection from {peer.address}: {reason}")
        elif peer.rank not in self._left:
            self._lose(peer.rank, f"rank {peer.rank} is gone: {reason}")

    def _complain(self, message: str) -> None:
        self._complaints += 1
        if self._complaints <= _MOST_COMPLAINTS:
            print(message, file=sys.stderr, flush=True)
