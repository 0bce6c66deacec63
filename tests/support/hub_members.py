"""A hub and its members in one process, and an object that leaves a file when it is unpickled."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from stages.comm.network import LOOPBACK
from stages.comm.rendezvous.client import Member
from stages.comm.rendezvous.hub import Hub

SECRET = b"s" * 32


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("harm-was-done"),)


@contextmanager
def hub_of(size: int, *, host: str = LOOPBACK) -> Iterator[Hub]:
    hub = Hub(host, size=size, secret=SECRET)
    try:
        yield hub
    finally:
        hub.close(failed=True)


@contextmanager
def members_of(hub: Hub, size: int, *, host: str = LOOPBACK) -> Iterator[list[Member]]:
    with ExitStack() as stack:
        members = []
        for rank in range(size):
            members.append(Member(host, hub.port, rank=rank, secret=SECRET, timeout=30))
            stack.callback(members[-1].close, failure=None)
        yield members


def all_at_once(*work: Any) -> list[Any]:
    with ThreadPoolExecutor(len(work)) as pool:
        return [future.result(timeout=120) for future in [pool.submit(part) for part in work]]
