"""What ranks exchange through the hub."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from support.hub_members import SECRET, Harmful, all_at_once, hub_of, members_of
from torch._C._distributed_c10d import PrefixStore

from stages.comm.network import LOOPBACK
from stages.comm.rendezvous.client import GoneError, HubStore, Meetings, Member


def test_what_ranks_tell_each_other() -> None:
    with hub_of(3) as hub, members_of(hub, 3) as members:
        meetings = [Meetings(member, "m", seconds=60) for member in members]
        to_one = all_at_once(*(lambda m=m, r=r: m.gather([r, 0.1], to=1) for r, m in enumerate(meetings)))
        assert to_one == [[], [[0, 0.1], [1, 0.1], [2, 0.1]], []]
        brought = [(None, "b0"), ("a1", "b1"), ("a2", None)]
        first = all_at_once(*(lambda m=m, b=b: m.first(*b) for m, b in zip(meetings, brought, strict=True)))
        assert first == [["a1", "b0"]] * 3


def test_a_rank_that_is_gone_or_late_is_named() -> None:
    with hub_of(3) as hub, members_of(hub, 2) as members:
        one, other = (Meetings(member, "m", seconds=60) for member in members)
        with pytest.raises(GoneError, match=r"waited too long for rank 1, 2"):
            one.gather(0, seconds=0.05)
        last = Member(LOOPBACK, hub.port, rank=2, secret=SECRET, timeout=30)
        waiting = ThreadPoolExecutor(1).submit(other.first, None)
        last.close(failure="ValueError: no more of it")
        with pytest.raises(GoneError, match="rank 2 failed: ValueError: no more of it"):
            waiting.result(timeout=60)
        with pytest.raises(GoneError, match="rank 2 failed: ValueError: no more of it"):
            one.gather(0)


def test_the_hub_keeps_torchs_values() -> None:
    with hub_of(2) as hub, members_of(hub, 2) as members:
        one, other = (HubStore(member, timeout=timedelta(seconds=60)) for member in members)
        waiting = ThreadPoolExecutor(1).submit(other.get, "address")
        one.set("address", bytes(range(256)))
        assert waiting.result(timeout=60) == bytes(range(256))
        assert (one.add("count", 2), other.add("count", 3)) == (2, 5)
        one.append("address", b"!")
        assert other.multi_get(["address", "count"]) == [bytes(range(256)) + b"!", b"5"]
        assert one.check(["count"])
        assert not one.check(["count", "missing"])
        assert one.compare_set("new", "", "a") == b"a"
        assert one.compare_set("new", "b", "c") == b"a"
        assert one.compare_set("new", "a", "c") == other.get("new") == b"c"
        # Called from C++, as a prefix of it does.
        prefixed = PrefixStore("of a group", one)
        prefixed.set("key", "value")
        assert prefixed.num_keys() == one.num_keys() == 4
        assert prefixed.delete_key("key")
        assert not one.delete_key("key")
        prefixed.set("again", "value")
        assert prefixed.clone().get("again") == b"value"
        with pytest.raises(GoneError, match="did not connect within"):
            other.wait(["missing"], timedelta(seconds=0.05))


def test_nothing_that_a_member_sends_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even of a process that knows the secret."""
    monkeypatch.chdir(tmp_path)
    with hub_of(2) as hub, members_of(hub, 2) as members:
        header = {"do": "gather", "name": "m 0", "to": None, "seconds": 60}
        odd = ThreadPoolExecutor(1).submit(members[1].ask, header, pickle.dumps(Harmful()), timeout=60)
        with pytest.raises(UnicodeDecodeError):
            Meetings(members[0], "m", seconds=60).gather(0)
        odd.result(timeout=60)
    assert not Path("harm-was-done").exists()


def test_a_hub_closes_whose_thread_has_seen_the_end_before_it_is_woken() -> None:
    """A message that comes in that moment wakes the thread, too."""
    with hub_of(1) as hub, members_of(hub, 1) as members:
        hub._closing = True
        with pytest.raises(GoneError):
            HubStore(members[0], timeout=timedelta(seconds=60)).get("any")
        hub._thread.join()
