"""Checks by a short job on two nodes: a shared folder, software, GPUs, and communication between ranks."""

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
from asyncpp_cli.launch.common.srun_command import network_variables, python_words
from asyncpp_cli.launch.submission import sbatch
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
        node_count = 1 if site.max_nodes == 1 else 2
        command = _command(site, made)
        job = sbatch.small_job(
            "asyncpp-doctor", command, nodes=node_count, code="none", output="doctor-%j.out"
        )
        job_id = sbatch.submit(short, made, job)
        names = [f"answer-{rank}.json" for rank in range(node_count)]
        problem = _wait(made, names, job_id, seconds=_JOB_TIMEOUT)
        nodes_found = [] if problem else [_read(made / name) for name in names]
        seconds = time.monotonic() - began
        handshake = _handshake(made, job_id) if len(nodes_found) > 1 else None
    except SlurmError as error:
        nodes_found, problem = [], str(error)
    finally:
        if job_id:
            with contextlib.suppress(SlurmError):  # SLURM may no longer know it
                slurm.cancel([job_id])
        shutil.rmtree(made, ignore_errors=True)
    if not nodes_found:
        advice = (
            "check that nodes see this folder and Python under the same paths; or wait, if it was pending"
        )
        yield wrong("job", problem, advice=advice)
        return
    hosts = " and ".join(node["host"] for node in nodes_found)
    yield good("job", f"{hosts} answered within {seconds:.0f} s, through {made.parent}")
    alike = site.python is None
    yield _first_wrong([software_check(node["versions"], alike=alike) for node in nodes_found])
    if handshake is None:
        yield good("two nodes", "not tried", note="the profile allows one node (max_nodes)")
    else:
        yield from handshake_checks(site, hosts, handshake)
    if site.gpus_per_node:
        yield _first_wrong([_gpus_check(site, node) for node in nodes_found])


def _command(site: Site, folder: Path) -> list[str]:
    """The command that starts a task on each node, in the same way as the ranks of a run."""
    variables = network_variables(site.network_interface)
    environment = {**{name: str(value) for name, value in site.environment.items()}, **variables}
    python = python_words(site.command_prefix, site.python, folder=folder, environment=environment)
    # The job of a run starts srun from this Python, which lacks what ranks in an image have.
    before = [] if site.python is None else [interpreter(), "-P", "-c", _STARTER]
    srun = ["srun", "--export=ALL", *site.srun_flags, *python, "-P", str(folder / "node_check.py")]
    unset = [f"--unset={name}" for name in slurm.SRUN_OPTIONS]
    return ["env", *unset, *(f"{name}={value}" for name, value in variables.items()), *before, *srun]


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
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def _first_wrong(checks: Sequence[Check]) -> Check:
    return next((check for check in checks if not check.ok), checks[0])


def _gpus_check(site: Site, node: dict[str, Any]) -> Check:
    if node["gpus"]:
        return good("gpus of a node", f"the job saw {node['gpus']}")
    advice = f"check {site.file}: gpu_type and flags (--gres), and that the node has nvidia-smi"
    return wrong("gpus of a node", f"the job requested a GPU on {node['host']} and saw none", advice=advice)


def handshake_checks(site: Site, hosts: str, handshake: dict[str, Any]) -> Iterator[Check]:
    """Whether ranks on two nodes found each other and exchanged tensors.

    Args:
        site: site profile.
        hosts: names of the two nodes.
        handshake: result of `stages.comm.handshake`, or `problem`.
    """
    if "problem" in handshake:
        advice = "check that nodes see the Python environment and this folder under the same paths"
        yield wrong("two nodes", handshake["problem"], advice=advice)
        return
    advice = (
        f"set {site.file}: network_interface to the interface between nodes; a firewall between nodes must "
        "allow connections on all ports"
    )
    for name, kind in (("two nodes", "gloo"), ("two nodes, GPUs", "nccl")):
        if handshake.get(kind):
            yield wrong(name, f"{kind}: {handshake[kind]}", advice=advice)
        elif kind in handshake:
            detail = f"ranks on {hosts} found each other and exchanged tensors ({exchanged(kind, handshake)})"
            yield good(
                name, detail, note=_OVER_TCP if "Socket" in handshake.get("nccl_transport", "") else ""
            )


def software_check(versions: dict[str, str], *, alike: bool) -> Check:
    """Whether a node has the packages that ranks need, and if `alike` in the versions of this machine."""
    differing = [
        f"{package} {version or 'missing'} (here {here})"
        for package, version in versions.items()
        if version != (here := metadata.version(package)) and (alike or not version)
    ]
    if differing:
        advice = "put the Python environment on a shared disk, under the same path everywhere"
        if not alike:
            advice = "install asyncpp's requirements in the image (containers/ has recipes), or set python"
        return wrong("software of a node", ", ".join(differing), advice=advice)
    return good("software of a node", ", ".join(f"{name} {version}" for name, version in versions.items()))
