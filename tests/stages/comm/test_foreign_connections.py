"""A foreign process that connects to a run's hub is refused, and the run goes on."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hub_members import SECRET, Harmful, all_at_once, hub_of, members_of
from support.privileges import network_namespace

from stages.comm.network import LOOPBACK
from stages.comm.process import ADDRESS_FILE, Process, connected
from stages.comm.rendezvous import authenticated
from stages.comm.rendezvous.authenticated import ForeignError
from stages.comm.rendezvous.client import GoneError, Meetings, Member
from stages.config.run_config import SiteConfig

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
    command = [*(within or []), sys.executable, "-c", FOREIGN, host, str(port), content.hex()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return ended.stdout.strip() or ended.stderr.strip()


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
    before = listening()

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
            process.gather(None)
            found = set(listening() - before)
            return process.gather(number), shared, found

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


def listening() -> set[str]:
    """The addresses that this process listens on, as /proc/net/tcp has them."""
    mine = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            mine.add(str(descriptor.readlink()))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in mine:
                found.add(columns[1])
    return found


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
