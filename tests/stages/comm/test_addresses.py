"""The address that a run's processes listen on."""

from __future__ import annotations

import os
import socket
import sys

import pytest
from support.command_line import ran
from support.privileges import network_namespace, with_loopback

from stages.comm.network import LOOPBACK, choose_address


def test_the_interface_is_the_chosen_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with network_namespace() as (_, outer):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", f"aph{os.getpid()}")
        assert choose_address(alone=False) == outer
        assert choose_address(alone=True) == LOOPBACK
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
        with pytest.raises(RuntimeError, match="GLOO_SOCKET_IFNAME is nowhere0, and there is no such"):
            choose_address(alone=False)


def test_an_address_is_chosen_that_is_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with socket.create_server((choose_address(alone=False), 0)):
        pass


@pytest.mark.parametrize(
    ("state", "address", "problem"),
    [
        ("down", "", "(127.0.0.1: Network is unreachable; ::1: Cannot assign requested address)"),
        # Waits for ten seconds, twice.
        pytest.param("filtered", "", "(127.0.0.1: timed out; ::1: timed out)", marks=pytest.mark.slow),
        ("IPv6 alone", "::1", ""),
    ],
)
def test_where_no_process_can_connect_that_is_said_at_once(state: str, address: str, problem: str) -> None:
    prefix = with_loopback(state)
    for alone in (True, False):
        code = f"from stages.comm.network import choose_address; print(choose_address(alone={alone}))"
        ended = ran(*prefix, sys.executable, "-c", code)
        last = ended.errors.splitlines()[-1:]
        assert ended.output.strip() == address, last
        assert bool(last) == bool(problem)
        for line in last:
            assert line.startswith("RuntimeError: processes of this machine cannot connect to each other (")
            assert problem in line
            assert "ip link set lo up" in line
