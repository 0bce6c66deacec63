"""What takes privileges of its own: other users, fewer rights, small disks, network namespaces."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.command_line import ASYNCPP, Ended, ran

NOBODY = "setpriv --ruid 54321 --bounding-set=-sys_resource,-sys_admin"

OWN_RIGHTS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
"""Command prefix that runs a program, also as root, with the rights that files give it."""


def permitted(command: str) -> bool:
    return ran("/bin/sh", "-c", command).code == 0


@dataclass(frozen=True)
class User:
    """Another user, who is in a group; needs root."""

    id: int
    group: int
    umask: int
    home: Path
    """In a folder that every user may enter; made when it is missing."""

    def permitted(self) -> bool:
        """Whether this machine lets the test act as this user."""
        return os.geteuid() == 0 and self.run("--version").code == 0

    def run(self, *arguments: str | Path) -> Ended:
        """Run `asyncpp` as this user."""
        self.home.mkdir(exist_ok=True)
        os.chown(self.home, self.id, self.id)
        identity = f"--reuid={self.id} --regid={self.id} --groups={self.group}"
        command = shlex.join([*ASYNCPP, *map(str, arguments)])
        script = f"{self._with_python()} exec setpriv {identity} {command}"
        own = {"HOME": str(self.home), "ASYNCPP_CACHE": f"{self.home}/cache"}
        place = {"umask": self.umask, "cwd": self.home, "env": os.environ | own}
        return ran("unshare", "-m", "--propagation", "private", "sh", "-c", script, **place)

    def _with_python(self) -> str:
        """Shell commands that make this Python accessible although it lies in a home that is not."""
        prefix = Path(sys.base_prefix)
        closed = [folder for folder in prefix.parents if not folder.stat().st_mode & 0o001]
        if not closed:
            return ""
        opened = self.home / "opened"
        inside = opened / prefix.relative_to(closed[-1])
        inside.mkdir(parents=True, exist_ok=True, mode=0o755)
        mounts = (f"mount --bind {prefix} {inside}", f"mount --rbind {opened} {closed[-1]}")
        return " && ".join([*mounts, ""])


@contextmanager
def disk(folder: Path, *, megabytes: int) -> Iterator[Path]:
    """A small disk, mounted at a new folder; without the right to mount one the test is skipped."""
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)]
    if subprocess.run(mounting, capture_output=True, check=False, timeout=60).returncode != 0:
        pytest.skip("no disk can be mounted here")
    try:
        yield folder
    finally:
        # Lazily: a job that has just ended may still stand in it.
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=60)


def fill(folder: Path) -> Path:
    """Fill the disk of a folder; returns the file to remove for room."""
    file = folder / "full"
    with file.open("wb", buffering=0) as opened:
        while shutil.disk_usage(folder).free:
            opened.write(bytes(4096))
    return file


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
