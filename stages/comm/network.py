"""The one address on which the processes of a run listen on this machine. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface (netdevice(7))."""


def choose_address(*, alone: bool) -> str:
    """The address to listen on.

    Loopback if the whole run is on this machine. Otherwise the address of the interface `GLOO_SOCKET_IFNAME`,
    else the one that the machine's name resolves to, else that of the default route.

    Args:
        alone: whether all processes of the run are on this machine.

    Raises:
        RuntimeError: `GLOO_SOCKET_IFNAME` names no interface with an IPv4 address.
    """
    if alone:
        return LOOPBACK
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface and sys.platform == "linux":
        return _address_of(interface)
    candidates = [
        *_addresses_of(socket.getfqdn()),
        *_addresses_of(socket.gethostname()),
        *_default_route_address(),
    ]
    usable = [address for address in candidates if _can_be_bound(address)]
    outer = [address for address in usable if not _is_loopback(address)]
    # Only loopback is usable: several "nodes" may be on one machine.
    return next(iter(outer or usable), LOOPBACK)


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
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # an address reserved for documentation, RFC 5737
        return [str(probe.getsockname()[0])]
    return []


def _can_be_bound(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        try:
            listener.bind((address, 0))
        except OSError:
            return False
    return True


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")
