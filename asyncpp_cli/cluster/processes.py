"""Is a process that a file names still there?

Pids are used again, so its start time is compared too. They are also only unique on one machine, since it was
started, and in one PID namespace (a container has its own): a process of another one is never looked for,
whatever the host is called.
"""

from __future__ import annotations

import getpass
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_UNKNOWN = 0
_LARGEST_PID = 2**31 - 1
_STOPPED = ("T", "t")
"""The kernel's letters for a process that SIGSTOP, or a debugger, has stopped."""


@dataclass(frozen=True)
class ProcessId:
    """A process on some machine."""

    host: str
    pid: int
    start: int
    """When it started, in the kernel's ticks since boot; 0 where the system does not say."""
    boot: str = ""
    """The kernel's name for this start of the machine; empty where the system does not say."""
    namespace: str = ""
    """The kernel's name for the PID namespace that the pid is of; likewise."""


def user_name() -> str:
    """Who runs this process: a name, or the number where it has none (a container without a passwd entry)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def this_process() -> ProcessId:
    """The calling process."""
    return process_id(os.getpid())


def process_id(pid: int) -> ProcessId:
    """A process of this machine, by its pid in the calling process's namespace."""
    host, boot, namespace = _here()
    return ProcessId(host, pid, _start(pid) or _UNKNOWN, boot, namespace)


def process_from(record: Any) -> ProcessId:
    """The process that a file names.

    Raises:
        ValueError: the record is no process.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"{record!r} names no process")
    pid, start = record.get("pid"), record.get("start")
    texts = [record.get("host"), record.get("boot", ""), record.get("namespace", "")]
    # A pid of 0 or less would mean many processes to kill(2).
    if type(pid) is not int or not 0 < pid <= _LARGEST_PID or type(start) is not int:
        raise ValueError(f"{record!r} names no process")
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{record!r} names no process")
    host, boot, namespace = map(str, texts)
    return ProcessId(host, pid, start, boot, namespace)


def is_here(process: ProcessId) -> bool:
    """Whether it is a process of this machine and PID namespace, so that it can be looked for."""
    host, boot, namespace = _here()
    return (
        process.host == host and _may_equal(process.boot, boot) and _may_equal(process.namespace, namespace)
    )


def is_gone(process: ProcessId) -> bool:
    """Whether a process of this machine has ended (one of another machine is never known to have)."""
    if not is_here(process):
        return False
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # somebody else's: there is one
    start = _start(process.pid)
    return start is None or start not in (process.start, _UNKNOWN)


def is_stopped(process: ProcessId) -> bool:
    """Whether a process of this machine is there but does nothing, since SIGSTOP came."""
    if not is_here(process) or is_gone(process):
        return False
    fields = _stat(process.pid)
    return fields is not None and fields[0] in _STOPPED


def end(process: ProcessId, number: signal.Signals) -> None:
    """Send a signal to a process of this machine, if it is still the same one."""
    if is_here(process) and not is_gone(process):
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            return


def _here() -> tuple[str, str, str]:
    """Host, boot and PID namespace of the calling process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (it is no path)
    except (OSError, UnicodeDecodeError):
        boot = namespace = ""
    return socket.gethostname(), boot, namespace


def _may_equal(one: str, other: str) -> bool:
    return not one or not other or one == other


def _start(pid: int) -> int | None:
    """Start time of a process; `_UNKNOWN` where there is no /proc; None if it has ended."""
    if not Path("/proc/self/stat").exists():
        return _UNKNOWN
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[19])


def _stat(pid: int) -> list[str] | None:
    """What the kernel says of a process, from its state on."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command's name stands in parentheses and may hold anything, parentheses and blanks too.
    return stat.rpartition(")")[2].split()
