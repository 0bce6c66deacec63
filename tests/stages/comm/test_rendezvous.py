"""What ranks exchange through the hub: sealed, never unpickled, and refused to foreign processes."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import ran
from support.connections import LISTENING, tcp_sockets
from support.privileges import network_namespace
from torch._C._distributed_c10d import PrefixStore

from stages.comm.network import LOOPBACK
from stages.comm.process import ADDRESS_FILE, Process, connected
from stages.comm.rendezvous import authenticated
from stages.comm.rendezvous.authenticated import ForeignError, Sealer, make_secret, read_secret
from stages.comm.rendezvous.client import GoneError, HubStore, Meetings, Member
from stages.comm.rendezvous.hub import Hub
from stages.config.run_config import SiteConfig

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


def test_messages_pass_whole_once_in_order_and_one_way() -> None:
    def sealer(direction: bytes = b"to hub", secret: bytes = SECRET) -> Sealer:
        return Sealer(secret, direction=direction, hub=b"h" * 32, member=b"m" * 32)

    sending = sealer()
    first, second = sending.seal({"number": 1}, b"one"), sending.seal({"number": 2}, b"two\n")
    opening, received = sealer(), bytearray(first + second[:-1])
    assert opening.open(received) == ({"number": 1}, b"one")
    assert opening.open(received) is None
    received += second[-1:]
    assert opening.open(received) == ({"number": 2}, b"two\n")
    with pytest.raises(ForeignError):
        opening.open(bytearray(second))  # repeated
    with pytest.raises(ForeignError):
        sealer().open(bytearray(second))  # the first is left out
    with pytest.raises(ForeignError):
        sealer(b"from hub").open(bytearray(first))  # turned back
    with pytest.raises(ForeignError):
        sealer(secret=b"x" * 32).open(bytearray(first))
    for place in range(4, len(first)):
        changed = bytearray(first)
        changed[place] ^= 1
        with pytest.raises(ForeignError):
            sealer().open(changed)


def test_a_secret_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        secret = make_secret(tmp_path / "met")
    finally:
        os.umask(before)
    file = tmp_path / "met" / "secret"
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_secret(tmp_path / "met") == secret
    assert make_secret(tmp_path / "met") != secret
    file.chmod(0o640)
    with pytest.raises(PermissionError, match="readable by its owner alone, and has mode 640"):
        read_secret(tmp_path / "met")
    (tmp_path / "elsewhere").write_text("00")
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        read_secret(tmp_path / "met")


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


ATTACKS = {
    "a pickle at once": pickle.dumps(Harmful()),
    # What torch's own store would have taken: its magic number, then a value under a key.
    "torch's store": bytes.fromhex("004fd83c85") + b"\x00" + b"0//0//x".ljust(200, b"\x00"),
    "a proof with another secret": b"m" * 32
    + (1).to_bytes(4, "big")
    + authenticated.proof(b"x" * 32, of=b"member", hub=b"h" * 32, member=b"m" * 32, rank=1)
    + pickle.dumps(Harmful()),
    "the web": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4,
    "nothing but zeros": bytes(4096),
}

FOREIGN = """
import socket, sys
host, port, content = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])
try:
    foreign = socket.create_connection((host, port), timeout=20)
except OSError as error:
    sys.exit(f"not connected: {error}")
foreign.sendall(content)
received = b""
try:
    while more := foreign.recv(4096):
        received += more
except ConnectionResetError:
    pass
print(received.hex())
"""


def attack(host: str, port: int, content: bytes, *, within: list[str] | None = None) -> str:
    """What a foreign process gets to see, as hex, or why it could not connect."""
    ended = ran(*(within or []), sys.executable, "-c", FOREIGN, host, str(port), content.hex())
    return ended.output.strip() or ended.errors.strip()


def greeting_alone(seen: str) -> bool:
    content = bytes.fromhex(seen)
    return content.startswith(authenticated.PROTOCOL) and len(content) == authenticated.GREETING_BYTES


def meet(members: list[Member]) -> list[Any]:
    meetings = [Meetings(member, "m", seconds=60) for member in members]
    return all_at_once(*(lambda m=m, r=r: m.gather({"rank": r}) for r, m in enumerate(meetings)))


@pytest.mark.parametrize("content", ATTACKS.values(), ids=ATTACKS)
def test_a_foreign_process_that_comes_first_is_refused(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with hub_of(2) as hub:
        assert greeting_alone(attack(LOOPBACK, hub.port, content))
        with members_of(hub, 2) as members:
            assert meet(members) == [[{"rank": 0}, {"rank": 1}]] * 2
    assert not Path("harm-was-done").exists()
    assert "warning: refused a connection from 127.0.0.1: " in capfd.readouterr().err


def test_a_run_goes_on_beside_foreign_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is there before rank 1, says nothing and stays; another says that it is rank 1."""
    monkeypatch.chdir(tmp_path)
    before = set(tcp_sockets(LISTENING))

    def rank(number: int) -> tuple[list[Any], list[float], set[str]]:
        with connected(
            rank=number,
            size=2,
            local_rank=number,
            local_size=2,
            rendezvous=tmp_path / "met",
            site=SiteConfig(device="cpu"),
        ) as process:
            shared = exchange(process)
            process.meetings.gather(None)
            found = set(tcp_sockets(LISTENING)) - before
            return process.meetings.gather(number), shared, found

    with ThreadPoolExecutor(2) as pool:
        first: Future[Any] = pool.submit(rank, 0)
        while not (tmp_path / "met" / ADDRESS_FILE).exists():
            assert not first.done() or first.result()
        host, _, port = (tmp_path / "met" / ADDRESS_FILE).read_text().rpartition(":")
        with socket.create_connection((host, int(port))):
            assert greeting_alone(attack(host, int(port), ATTACKS["a proof with another secret"]))
            second = pool.submit(rank, 1)
            results = [first.result(timeout=120), second.result(timeout=120)]
    for gathered, shared, found in results:
        assert (gathered, shared) == ([0, 1], [0.0, 1.0])
        # Of the rendezvous and of gloo.
        assert len(found) >= 2
        assert {address.partition(":")[0] for address in found} == {"0100007F"}  # 127.0.0.1, as Linux has it
    assert not Path("harm-was-done").exists()


def exchange(process: Process) -> list[float]:
    everyone = [torch.zeros(1) for _ in range(process.size)]
    mine = torch.full((1,), float(process.rank))
    process.communicator("test", range(process.size)).allgather([everyone], [mine]).wait()
    return [float(one) for one in everyone]


def test_from_another_network_nobody_gets_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = ATTACKS["a pickle at once"]
    with network_namespace() as (within, outer):
        with hub_of(2) as hub:  # of a run on one machine
            assert "refused" in attack(outer, hub.port, content, within=within)
        with hub_of(2, host=outer) as hub:  # of a run on several
            assert greeting_alone(attack(outer, hub.port, content, within=within))
            with members_of(hub, 2, host=outer) as members:
                assert meet(members) == [[{"rank": 0}, {"rank": 1}]] * 2
    assert not Path("harm-was-done").exists()


def test_a_member_trusts_no_other_hub(tmp_path: Path) -> None:
    with (
        hub_of(2) as hub,
        pytest.raises(GoneError, match=r"did not take this process for one of its run within 0\.1 s"),
    ):
        Member(LOOPBACK, hub.port, rank=1, secret=b"x" * 32, timeout=0.1)

    def answer(listener: socket.socket, content: bytes) -> None:
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(content)
            with suppress(ConnectionResetError):
                accepted.recv(authenticated.PROOF_BYTES)

    for content, words in (
        (
            authenticated.PROTOCOL + bytes(authenticated.RANDOM_BYTES + authenticated.MAC_BYTES),
            "does not know this attempt's",
        ),
        (b"SSH-2.0-OpenSSH_9.2".ljust(200), "is not a process of this run"),
    ):
        with socket.create_server((LOOPBACK, 0)) as listener:
            thread = threading.Thread(target=answer, args=(listener, content))
            thread.start()
            with pytest.raises(ForeignError, match=words):
                Member(LOOPBACK, listener.getsockname()[1], rank=1, secret=SECRET, timeout=30)
            thread.join()
