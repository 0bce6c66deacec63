"""A second network namespace of this machine."""

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
