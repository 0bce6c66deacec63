"""Network namespaces of this machine, besides its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def network_namespace() -> Iterator[tuple[list[str], str]]:
    """Command prefix that runs a program in a new network namespace, and this one's address seen from there.

    Skips the test where no namespace can be made.
    """
    name, near_end, far_end = f"asyncpp{os.getpid()}", f"aph{os.getpid()}", f"apt{os.getpid()}"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("making a network namespace needs root and ip(8)")
    # Addresses for benchmarks of networks, RFC 2544.
    commands = [
        f"ip netns add {name}",
        f"ip link add {near_end} type veth peer name {far_end} netns {name}",
        f"ip addr add 198.18.77.1/30 dev {near_end}",
        f"ip link set {near_end} up",
        f"ip -n {name} addr add 198.18.77.2/30 dev {far_end}",
        f"ip -n {name} link set {far_end} up",
    ]
    try:
        for command in commands:
            ended = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if ended.returncode != 0:
                pytest.skip(f"{command}: {ended.stderr.strip()}")
        yield ["ip", "netns", "exec", name], "198.18.77.1"
    finally:
        for command in (f"ip link del {near_end}", f"ip netns del {name}"):
            subprocess.run(command.split(), capture_output=True, check=False)


LOOPBACKS = {
    "down": "true",
    "filtered": "ip link set lo up && tc qdisc add dev lo root pfifo limit 0",
    "IPv6 alone": "ip link set lo up && ip addr del 127.0.0.1/8 dev lo",
}
"""What makes the loopback interface of a new namespace so, as a line of the shell."""


def with_loopback(state: str) -> list[str]:
    """Command prefix that runs a program where there is a loopback interface alone, in one of `LOOPBACKS`.

    Skips the test where that cannot be made.
    """
    words = ["unshare", "--net", "sh", "-c", f'{LOOPBACKS[state]} && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], check=False).returncode != 0:
        pytest.skip(f"making a network namespace needs root, unshare(1), ip(8) and tc(8) here: {state}")
    return words
