"""The store that a gloo communicator is made from: one request to the hub for the addresses of all members.

gloo asks for every peer's address by itself, twice, when it first connects to it: of n members that would be
about 2n requests each.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from stages.comm.rendezvous.authenticated import Json
from stages.comm.rendezvous.client import HubStore, Member


class GroupStore(HubStore):
    """Keys under the name of one communicator, whose members each set the key `.../RANK` once.

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
        """The same key of all members, if it is one of a member's; else the key alone."""
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
