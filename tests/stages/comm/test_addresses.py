"""The address that a run's processes listen on."""

from __future__ import annotations

import os
import socket

import pytest
from support.network_namespace import network_namespace

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
