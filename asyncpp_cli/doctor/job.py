"""A short job on two nodes of the cluster: what they have, whether they see what this machine wrote, and
whether ranks on them would find each other."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from asyncpp_cli.cluster import arrays, slurm
from asyncpp_cli.cluster.job_states import Phase, phase_of
from asyncpp_cli.cluster.sites import Site
from asyncpp_cli.cluster.slurm import SlurmError
from asyncpp_cli.cluster.snapshot import copy_code, interpreter
from asyncpp_cli.doctor import answers, on_node
from asyncpp_cli.doctor.checks import Check, good, wrong

_SECONDS = 120.0
_SECONDS_TO_MEET = 120.0
"""For two ranks to meet: more than either waits (`on_node`)."""
_SECONDS_UNSEEN = 15.0
"""That a file may take to be seen here, where a disk is shared but slowly."""
_SECONDS_OF_DOUBT = 20.0
"""By which clocks may differ: as in `cluster.queue`."""


def job_checks(site: Site, folder: Path) -> Iterator[Check]:
    """Submit a job, wait for it, but not for long, and say what it found.

    Args:
        site: where.
        folder: where experiments are to lie; the job works in a folder in it, which is removed.
    """
    made = Path(tempfile.mkdtemp(prefix="asyncpp-doctor-", dir=folder.absolute()))
    # Short, so that it finds a gap; with a GPU where the site has some.
    short = replace(site, time="5", flags=site.flags | ({"gres": "gpu:1"} if site.gpus_per_node else {}))
    began = time.monotonic()
    job_id = ""
    try:
        shutil.copy(on_node.__file__, made / "on_node.py")
        copy_code(made / "code")
        nodes = _nodes(site)
        job_id = arrays.submit_single(
            short, made, name="asyncpp-doctor", nodes=nodes, command=_command(site), after=[], code="none"
        )
        names = [f"answer-{rank}.json" for rank in range(nodes)]
        problem = _wait(made, names, job_id, seconds=_SECONDS)
        found = [] if problem else [_read(made / name) for name in names]
        seconds = time.monotonic() - began
        met = _handshake(made, job_id) if len(found) > 1 else None
    except SlurmError as error:
        found, problem = [], str(error)
    finally:
        if job_id:
            with contextlib.suppress(SlurmError):  # it may be forgotten already
                slurm.cancel([job_id])
        shutil.rmtree(made, ignore_errors=True)
    if not found:
        advice = "see that nodes see this folder and this Python, by the same paths; or wait, if it waited"
        yield wrong("job", problem, advice=advice)
        return
    hosts = " and ".join(node["host"] for node in found)
    yield good("job", f"{hosts} answered within {seconds:.0f} s, through {made.parent}")
    yield _first_wrong([software_check(node["versions"]) for node in found])
    yield _first_wrong([network_check(site, node) for node in found])
    if met is None:
        yield good("two nodes", "not tried", note="the partition has one node that is up")
    else:
        yield from handshake_checks(site, hosts, met)
    yield from _clock_checks(found)
    if site.gpus_per_node:
        yield _first_wrong([_gpus_check(site, node) for node in found])


def _nodes(site: Site) -> int:
    """Two where jobs can be given as many."""
    partition = answers.chosen(site.partition, answers.partitions())
    up = [] if partition is None else [n for n in answers.nodes(partition["PartitionName"]) if n.is_up]
    return 2 if len(up) > 1 else 1


def _command(site: Site) -> list[str]:
    """What starts a task on each node, as the ranks of a run are started."""
    interface = site.network_interface
    named = [f"GLOO_SOCKET_IFNAME={interface}", f"NCCL_SOCKET_IFNAME={interface}"] if interface else []
    return ["env", *named, "srun", "--export=ALL", *site.srun_flags, interpreter(), "-P", "on_node.py"]


def _handshake(folder: Path, job_id: str) -> dict[str, Any]:
    """What rank 0 found, or the problem that one of the ranks had."""
    names = ["handshake-0.json", "handshake-1.json"]
    problem = _wait(folder, names, job_id, seconds=_SECONDS_TO_MEET)
    if problem:
        return {"problem": problem}
    first, second = (_read(folder / name) for name in names)
    return second if "problem" in second else first


def _wait(folder: Path, names: Sequence[str], job_id: str, *, seconds: float) -> str:
    """Wait until the files are there. Why they are not; empty if they are."""
    deadline = time.monotonic() + seconds
    ended = None
    while time.monotonic() < deadline:
        # Listing a folder makes network filesystems look again.
        if set(names) <= {entry.name for entry in folder.iterdir()}:
            return ""
        if ended is None:
            state = slurm.state_of(job_id)
            if state == "gone" or phase_of(state) is Phase.OVER:
                ended = time.monotonic()
        if ended is not None and time.monotonic() - ended > _SECONDS_UNSEEN:
            printed = " ".join(file.read_text(errors="replace") for file in folder.glob("*.out")).split("\n")
            said = next(
                (line.strip() for line in reversed(printed) if line.strip()), "and printed nothing here"
            )
            return f"job {job_id} ended and left no answer: {said}"[:300]
        time.sleep(0.3)
    return f"job {job_id} did not answer within {seconds:g} s; it was {slurm.state_of(job_id).lower()}"


def _read(file: Path) -> dict[str, Any]:
    """What a task wrote, and when that was by the clock of the folder."""
    found: dict[str, Any] = json.loads(file.read_text())
    return found | {"seen": file.stat().st_mtime}


def _first_wrong(checks: Sequence[Check]) -> Check:
    return next((check for check in checks if not check.ok), checks[0])


def _clock_checks(found: Sequence[dict[str, Any]]) -> Iterator[Check]:
    for node in found:
        difference = abs(node["time"] - node["seen"])
        if difference > _SECONDS_OF_DOUBT:
            advice = "set the clocks (NTP): it is by them that a run's last sign is judged"
            yield wrong("clock", f"that of {node['host']} differs by {difference:.0f} s", advice=advice)


def _gpus_check(site: Site, node: dict[str, Any]) -> Check:
    if node["gpus"]:
        return good("gpus of a node", f"the job saw {node['gpus']}")
    advice = f"{site.file}: gpu_type or flags: what --gres takes here; or nvidia-smi is missing there"
    return wrong("gpus of a node", f"the job asked {node['host']} for one and saw none", advice=advice)


def handshake_checks(site: Site, hosts: str, met: dict[str, Any]) -> Iterator[Check]:
    """Whether ranks on two nodes found each other and exchanged numbers.

    Args:
        site: where.
        hosts: the two.
        met: what `stages.handshake` found there, or `problem`.
    """
    if "problem" in met:
        advice = "see that nodes see the Python environment, and this folder, by the same paths"
        yield wrong("two nodes", met["problem"], advice=advice)
        return
    advice = (
        f"{site.file}: network_interface: the one that nodes reach each other by; a firewall between nodes "
        "must let processes of a job through, on any port"
    )
    for name, kind in (("two nodes", "gloo"), ("two nodes, GPUs", "nccl")):
        if kind in met:
            said = f"ranks on {hosts} found each other and exchanged numbers ({kind})"
            problem = f"{kind}: {met[kind]}"
            yield wrong(name, problem, advice=advice) if met[kind] else good(name, said)


def software_check(there: dict[str, str]) -> Check:
    """Whether a node has the packages of this machine."""
    differing = [
        f"{package} {version or 'missing'} (here {here})"
        for package, version in there.items()
        if version != (here := metadata.version(package))
    ]
    if differing:
        advice = "put the Python environment on a disk that the nodes see, under the same path"
        return wrong("software of a node", ", ".join(differing), advice=advice)
    return good("software of a node", ", ".join(f"{name} {version}" for name, version in there.items()))


def network_check(site: Site, found: dict[str, Any]) -> Check:
    """Whether ranks on several nodes could find each other."""
    interface, there = site.network_interface, found["interfaces"]
    others = [name for name in there if name != "lo"]
    if interface is not None and interface not in there:
        advice = f"{site.file}: network_interface: accepted: {', '.join(others)}"
        return wrong("network", f"{found['host']} has no interface {interface}", advice=advice)
    if interface is not None:
        return good("network", f"{found['host']} has {interface}")
    address = found["address"]
    if not address or address.startswith("127."):
        detail = f"{found['host']} has the address {address or 'none'} by its name: other nodes cannot use it"
        accepted = ", ".join(others)
        return wrong("network", detail, advice=f"{site.file}: network_interface: one of {accepted}")
    return good("network", f"{found['host']} is {address} by its name; interfaces {', '.join(others)}")
