"""Checks by a short job on two nodes: software, GPUs, a shared folder, and communication between ranks."""

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

from asyncpp_cli.doctor import node_check
from asyncpp_cli.doctor.checks import Check, exchanged, good, wrong
from asyncpp_cli.launch.common.snapshot import copy_code, interpreter
from asyncpp_cli.launch.common.srun_command import network_variables
from asyncpp_cli.launch.submission import sbatch
from asyncpp_cli.runs.status import CLOCK_MARGIN
from asyncpp_cli.sites.containers import Container, ContainerError, container_words, mounts_with
from asyncpp_cli.sites.profile import Site
from asyncpp_cli.slurm import client as slurm
from asyncpp_cli.slurm.client import JobPhase, SlurmError, phase_of

_JOB_TIMEOUT = 120.0
_HANDSHAKE_TIMEOUT = 120.0
"""Seconds for the handshake; longer than either rank waits (`node_check`)."""
_VISIBILITY_TIMEOUT = 15.0
"""Seconds until a file on a slow shared disk is seen here."""
_STARTER = "import os, sys; import msgspec, submitit; os.execvp(sys.argv[1], sys.argv[1:])"
"""Python code that becomes the command in its arguments, where the job of a run finds its packages."""
_OVER_TCP = (
    "NCCL uses TCP; on InfiniBand or RoCE it needs libibverbs and its providers, in the image, too "
    "(NCCL_DEBUG=INFO says why)"
)


def job_checks(site: Site, folder: Path) -> Iterator[Check]:
    """Checks made by a short job, which is cancelled if it takes too long.

    Args:
        site: site profile.
        folder: folder for experiments; the job works in a temporary folder in it.
    """
    made = Path(tempfile.mkdtemp(prefix="asyncpp-doctor-", dir=folder.absolute()))
    # Short, so that it starts soon; with a GPU if the site has any.
    flags = site.flags | ({"gres": "gpu:1"} if site.gpus_per_node else {})
    short = replace(site, time="5", signal_lead=10, flags=flags)
    began = time.monotonic()
    job_id = ""
    try:
        shutil.copy(node_check.__file__, made / "node_check.py")
        copy_code(made / "code")
        nodes = 1 if site.max_nodes == 1 else 2
        job_id = sbatch.submit_job(
            short,
            made,
            name="asyncpp-doctor",
            nodes=nodes,
            command=_command(site, made),
            after=[],
            code="none",
            output="doctor-%j.out",
        )
        names = [f"answer-{rank}.json" for rank in range(nodes)]
        problem = _wait(made, names, job_id, seconds=_JOB_TIMEOUT)
        found = [] if problem else [_read(made / name) for name in names]
        seconds = time.monotonic() - began
        met = _handshake(made, job_id) if len(found) > 1 else None
    except (SlurmError, ContainerError) as error:
        found, problem = [], str(error)
    finally:
        if job_id:
            with contextlib.suppress(SlurmError):  # SLURM may no longer know it
                slurm.cancel([job_id])
        shutil.rmtree(made, ignore_errors=True)
    if not found:
        seen = "the image" if site.container is not None else "Python"
        advice = (
            f"check that nodes see this folder and {seen} under the same paths; or wait, if it was pending"
        )
        yield wrong("job", problem, advice=advice)
        return
    hosts = " and ".join(node["host"] for node in found)
    yield good("job", f"{hosts} answered within {seconds:.0f} s, through {made.parent}")
    if site.container is None:
        yield _first_wrong([software_check(node["versions"]) for node in found])
    else:
        yield _first_wrong([image_check(site.container, node) for node in found])
    yield _first_wrong([network_check(site, node) for node in found])
    if met is None:
        yield good("two nodes", "not tried", note="the profile allows one node (max_nodes)")
    else:
        yield from handshake_checks(site, hosts, met)
    yield from _clock_checks(found)
    if site.gpus_per_node:
        yield _first_wrong([_gpus_check(site, node) for node in found])


def _command(site: Site, folder: Path) -> list[str]:
    """The command that starts a task on each node, in the same way as the ranks of a run.

    Raises:
        ContainerError: the folder cannot be mounted.
    """
    network = network_variables(site.network_interface)
    before: list[str] = []
    flags: list[str] = []
    python = [interpreter()]
    if site.container is not None:
        # The job of a run starts the container from this Python.
        before = [interpreter(), "-P", "-c", _STARTER]
        flags, python = container_words(
            site.container,
            mounts_with(site.container, [(folder, "rw")]),
            work_folder=folder,
            gpus=site.gpus_per_node > 0,
            environment={name: str(value) for name, value in site.environment.items()} | network,
        )
    named = [f"{name}={value}" for name, value in network.items()]
    srun = ["srun", "--export=ALL", *site.srun_flags, *flags, *python, "-P", "node_check.py"]
    unset = [f"--unset={name}" for name in slurm.SRUN_OPTIONS]
    return ["env", *unset, *named, *before, *srun]


def _handshake(folder: Path, job_id: str) -> dict[str, Any]:
    """Result of the handshake on rank 0, or `problem` if a rank had one."""
    names = ["handshake-0.json", "handshake-1.json"]
    problem = _wait(folder, names, job_id, seconds=_HANDSHAKE_TIMEOUT)
    if problem:
        return {"problem": problem}
    first, second = (_read(folder / name) for name in names)
    return second if "problem" in second else first


def _wait(folder: Path, names: Sequence[str], job_id: str, *, seconds: float) -> str:
    """Wait until the files exist; returns the problem if they do not, else an empty text."""
    deadline = time.monotonic() + seconds
    ended = None
    while time.monotonic() < deadline:
        # Listing the folder refreshes the cache of network filesystems.
        if set(names) <= {entry.name for entry in folder.iterdir()}:
            return ""
        if ended is None:
            state = slurm.job_state(job_id)
            if state == "gone" or phase_of(state) is JobPhase.ENDED:
                ended = time.monotonic()
        if ended is not None and time.monotonic() - ended > _VISIBILITY_TIMEOUT:
            printed = " ".join(file.read_text(errors="replace") for file in folder.glob("*.out")).split("\n")
            said = next(
                (line.strip() for line in reversed(printed) if line.strip()), "and printed nothing here"
            )
            return f"job {job_id} ended and left no answer: {said}"[:300]
        time.sleep(0.3)
    return f"job {job_id} did not answer within {seconds:g} s; it was {slurm.job_state(job_id).lower()}"


def _read(file: Path) -> dict[str, Any]:
    """A task's JSON file, with its modification time as `seen`."""
    content: dict[str, Any] = json.loads(file.read_text())
    return content | {"seen": file.stat().st_mtime}


def _first_wrong(checks: Sequence[Check]) -> Check:
    return next((check for check in checks if not check.ok), checks[0])


def _clock_checks(found: Sequence[dict[str, Any]]) -> Iterator[Check]:
    for node in found:
        difference = abs(node["time"] - node["seen"])
        if difference > CLOCK_MARGIN:
            advice = "synchronise the clocks (NTP): heartbeats of runs depend on them"
            yield wrong("clock", f"the clock of {node['host']} is off by {difference:.0f} s", advice=advice)


def _gpus_check(site: Site, node: dict[str, Any]) -> Check:
    if node["gpus"]:
        return good("gpus of a node", f"the job saw {node['gpus']}")
    advice = f"check {site.file}: gpu_type and flags (--gres), and that the node has nvidia-smi"
    return wrong("gpus of a node", f"the job requested a GPU on {node['host']} and saw none", advice=advice)


def handshake_checks(site: Site, hosts: str, met: dict[str, Any]) -> Iterator[Check]:
    """Whether ranks on two nodes found each other and exchanged tensors.

    Args:
        site: site profile.
        hosts: names of the two nodes.
        met: result of `stages.comm.handshake`, or `problem`.
    """
    if "problem" in met:
        advice = "check that nodes see the Python environment and this folder under the same paths"
        yield wrong("two nodes", met["problem"], advice=advice)
        return
    advice = (
        f"set {site.file}: network_interface to the interface between nodes; a firewall between nodes must "
        "allow connections on all ports"
    )
    for name, kind in (("two nodes", "gloo"), ("two nodes, GPUs", "nccl")):
        if met.get(kind):
            yield wrong(name, f"{kind}: {met[kind]}", advice=advice)
        elif kind in met:
            detail = f"ranks on {hosts} found each other and exchanged tensors ({exchanged(kind, met)})"
            yield good(name, detail, note=_OVER_TCP if "Socket" in met.get("nccl_transport", "") else "")


def software_check(versions: dict[str, str]) -> Check:
    """Whether a node has the same package versions as this machine."""
    differing = [
        f"{package} {version or 'missing'} (here {here})"
        for package, version in versions.items()
        if version != (here := metadata.version(package))
    ]
    if differing:
        advice = "put the Python environment on a shared disk, under the same path everywhere"
        return wrong("software of a node", ", ".join(differing), advice=advice)
    return good("software of a node", ", ".join(f"{name} {version}" for name, version in versions.items()))


def image_check(container: Container, node: dict[str, Any]) -> Check:
    """Whether the image has what the ranks need. Its versions need not be those of this machine."""
    versions = {"Python": node["python"], **{name: node["versions"][name] for name in ("torch", "msgspec")}}
    if missing := [name for name, version in versions.items() if not version]:
        advice = (
            "install asyncpp's requirements in the image (containers/ has recipes), or set container.python"
        )
        return wrong(
            "software of the image", f"{container.image} lacks {' and '.join(missing)}", advice=advice
        )
    if tuple(map(int, node["python"].split(".")[:2])) < (3, 11):
        advice = "set container.python to a newer one"
        return wrong("software of the image", f"Python {node['python']}; 3.11 is needed", advice=advice)
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return good("software of the image", f"{listed}, in {container.image}")


def network_check(site: Site, found: dict[str, Any]) -> Check:
    """Whether a node has an address or interface that other nodes can reach."""
    interface, interfaces = site.network_interface, found["interfaces"]
    others = [name for name in interfaces if name != "lo"]
    if interface is not None and interface not in interfaces:
        advice = f"{site.file}: network_interface: accepted: {', '.join(others)}"
        return wrong("network", f"{found['host']} has no interface {interface}", advice=advice)
    if interface is not None:
        return good("network", f"{found['host']} has {interface}")
    address = found["address"]
    if not address or address.startswith("127."):
        detail = f"{found['host']} has {address or 'no address'} for its name: other nodes cannot reach it"
        accepted = ", ".join(others)
        return wrong("network", detail, advice=f"{site.file}: network_interface: one of {accepted}")
    return good("network", f"{found['host']} resolves its name to {address}; interfaces {', '.join(others)}")
