"""A short job on the cluster: what a node has, and whether it sees what this machine wrote."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from asyncpp_cli.cluster import arrays, slurm
from asyncpp_cli.cluster.sites import Site
from asyncpp_cli.cluster.slurm import SlurmError
from asyncpp_cli.cluster.snapshot import interpreter
from asyncpp_cli.doctor import on_node
from asyncpp_cli.doctor.checks import Check, good, wrong

_SECONDS = 120.0
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
    shutil.copy(on_node.__file__, made / "on_node.py")
    # Short, so that it finds a gap; with a GPU where the site has some.
    short = replace(site, time="5", flags=site.flags | ({"gres": "gpu:1"} if site.gpus_per_node else {}))
    began = time.monotonic()
    job_id = ""
    try:
        command = [interpreter(), "-P", "on_node.py"]
        job_id = arrays.submit_single(
            short, made, name="asyncpp-doctor", command=command, after=[], code="none"
        )
        found, problem = _answer(made, job_id)
        seconds = time.monotonic() - began
    except SlurmError as error:
        found, problem = None, str(error)
    finally:
        if job_id:
            with contextlib.suppress(SlurmError):  # it may be forgotten already
                slurm.cancel([job_id])
        shutil.rmtree(made, ignore_errors=True)
    if found is None:
        advice = "see that nodes see this folder and this Python, by the same paths; or wait, if it waited"
        yield wrong("job", problem, advice=advice)
        return
    yield good("job", f"{found['host']} answered within {seconds:.0f} s, through {made.parent}")
    yield software_check(found["versions"])
    yield network_check(site, found)
    difference = abs(found["time"] - found["seen"])
    if difference > _SECONDS_OF_DOUBT:
        advice = "set the clocks (NTP): it is by them that a run's last sign is judged"
        yield wrong("clock", f"that of {found['host']} differs by {difference:.0f} s", advice=advice)
    if site.gpus_per_node:
        if found["gpus"]:
            yield good("gpus of a node", f"the job saw {found['gpus']}")
        else:
            advice = f"{site.file}: gpu_type or flags: what --gres takes here; or nvidia-smi is missing there"
            yield wrong("gpus of a node", "the job asked for one and saw none", advice=advice)


def _answer(folder: Path, job_id: str) -> tuple[dict[str, Any] | None, str]:
    """What the job found, or else why there is nothing."""
    deadline = time.monotonic() + _SECONDS
    ended = None
    while time.monotonic() < deadline:
        # Listing a folder makes network filesystems look again.
        names = [entry.name for entry in folder.iterdir()]
        if "answer.json" in names:
            found: dict[str, Any] = json.loads((folder / "answer.json").read_text())
            return found | {"seen": (folder / "answer.json").stat().st_mtime}, ""
        if ended is None and slurm.state_of(job_id) in ("gone", "COMPLETED", "FAILED"):
            ended = time.monotonic()
        if ended is not None and time.monotonic() - ended > _SECONDS_UNSEEN:
            printed = " ".join(file.read_text(errors="replace") for file in folder.glob("*.out")).split("\n")
            said = next(
                (line.strip() for line in reversed(printed) if line.strip()), "and printed nothing here"
            )
            return None, f"job {job_id} ended and left no answer: {said}"[:300]
        time.sleep(0.3)
    return None, f"job {job_id} did not answer within {_SECONDS:g} s; it was {slurm.state_of(job_id).lower()}"


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
