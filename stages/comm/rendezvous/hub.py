"""The server at which the ranks of a run meet: a thread in rank 0's process. Imports no torch.

It holds the key-value store that communicators are made from (`store`) and the meetings by which ranks
exchange values outside of training (`meetings`). Each rank has one connection to it; rank 0's process has one
per rank.

Nothing that arrives is parsed before its sender has proved that it knows the attempt's secret
(`stages.comm.rendezvous.authenticated`), except the proof itself, which has a fixed size and a time limit.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass, field

from stages.comm.rendezvous import authenticated
from stages.comm.rendezvous.authenticated import ForeignError, Json, Sealer
from stages.comm.rendezvous.meetings import OpenMeetings
from stages.comm.rendezvous.request import Request
from stages.comm.rendezvous.store import KeyValueStore

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
