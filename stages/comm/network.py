"""The one address on which the processes of a run listen on this machine. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Sequence

LOOPBACK = "127.0.0.1"
_LOOPBACK_6 = "::1"
_SECONDS_TO_CONNECT = 5.0
"""The kernel connects a process to itself at once, unless a firewall drops what is sent."""
_SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface (netdevice(7))."""


def choose_address(*, alone: bool) -> str:
    """The address to listen on.

    Loopback if the whole run is on this machine (IPv6's if there is no other). Otherwise the address of the
    interface `GLOO_SOCKET_IFNAME`, else the one that the machine's name resolves to, else that of the default
    route; only such at which a process of this machine can connect to another.

    Args:
        alone: whether all processes of the run are on this machine.

    Raises:
        RuntimeError: `GLOO_SOCKET_IFNAME` names no interface with an IPv4 address, or no process can connect.
    """
    if alone:
        return _reached([LOOPBACK, _LOOPBACK_6])
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface and sys.platform == "linux":
        return _reached([_address_of(interface)])
    candidates = [
        *_addresses_of(socket.getfqdn()),
        *_addresses_of(socket.gethostname()),
        *_default_route_address(),
    ]
    # Only loopback may be usable: several "nodes" may be on one machine.
    return _reached([*sorted(candidates, key=_is_loopback), LOOPBACK, _LOOPBACK_6])


def set_nccl_interface(*, alone: bool) -> None:
    """Set NCCL_SOCKET_IFNAME to the interface that gloo uses, unless it is set.

    On one machine NCCL needs a socket for its start only.
    """
    if sys.platform != "linux":
        return
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if alone:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")
    elif interface:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            raise RuntimeError(
                f"GLOO_SOCKET_IFNAME is {interface}, and there is no such network interface with an IPv4 "
                f"address here ({error.strerror}); accepted: {', '.join(n for _, n in socket.if_nameindex())}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _addresses_of(name: str) -> list[str]:
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in entries]


def _default_route_address() -> list[str]:
    """The source address of the default route; no packet is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address reserved for documentation, RFC 5737
        return [str(probe.getsockname()[0])]
    return []


def _reached(addresses: Sequence[str]) -> str:
    """The first of these addresses at which a process here can connect to another.

    Raises:
        RuntimeError: there is none.
    """
    problems = []
    for address in dict.fromkeys(addresses):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with (
                socket.create_server((address, 0), family=family) as listener,
                socket.create_connection(listener.getsockname()[:2], timeout=_SECONDS_TO_CONNECT),
            ):
                return address
        except OSError as error:
            problems.append(f"{address}: {os.strerror(error.errno) if error.errno else error}")
    raise RuntimeError(
        f"processes of this machine cannot connect to each other ({'; '.join(problems)}): "
        "is the loopback interface up (ip link set lo up), and does a firewall let its connections through?"
    )


def _is_loopback(address: str) -> bool:
    return address == _LOOPBACK_6 or address.startswith("127.")
