"""Nodes on which runs failed by the node's own fault: what runs there next leaves them out.

    EXPERIMENT/bad-nodes/NODE.json   what happened there, to which run, and when

A fault of the node is what SLURM says of it (down, failing, not responding), and an error of the GPU or its
driver: CUDA that cannot be initialised, memory errors that ECC cannot correct. Such an attempt costs none of
the run's retries, as long as its node can be left out. That has bounds: an error that is taken for the node's
and is the software's would otherwise go from node to node for ever.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncpp_cli.cluster.attempts import Attempt
from asyncpp_cli.errors import DamagedError
from asyncpp_cli.files import read_json, write_json
from asyncpp_cli.runs import FORMAT, Experiment, Run

SECONDS_LEFT_OUT = 24 * 3600.0
"""How long a node is left out: by then it may have been mended."""

_MOST = 8
_PART = 4
"""At most one node in so many is left out, but always one."""

_LINES = 50
"""Of a rank's log, from its end."""
_BYTES = 20_000

_FAULT = re.compile(
    r"CUDA (driver )?initiali[sz]ation"
    r"|CUDA error: (unknown error|initialization error|system not yet initialized|hardware stack error)"
    r"|CUDA unknown error"
    r"|CUDA-capable device(s|\(s\))? (is/are|are|is) busy or unavailable"
    r"|no CUDA-capable device is detected"
    r"|torch finds no GPU here"
    r"|uncorrectable (ECC|NVLink) error"
    r"|cudaError(ECCUncorrectable|NvlinkUncorrectable|SystemNotReady|DevicesUnavailable|NoDevice)"
    r"|GPU is lost|fallen off the bus"
    r"|Driver/library version mismatch|NVML: Unknown Error|couldn't communicate with the NVIDIA driver",
    re.IGNORECASE,
)
"""Messages of CUDA, its driver and torch that are not the program's fault (torch/cuda/__init__.py,
cudaGetErrorString, NVIDIA's Xid errors 48 and 79)."""


@dataclass(frozen=True, kw_only=True)
class BadNode:
    """The content of a node's file."""

    node: str
    """As SLURM calls it."""
    cluster: str
    reason: str
    run: str
    """The id of the run that met it."""
    attempt: int
    time: float
    """Seconds since 1970."""


def fault_of(attempt: Attempt) -> tuple[str, str] | None:
    """The node on which an attempt failed by the node's fault, and what was said; None if by no node's."""
    for file in sorted(attempt.folder.glob("rank-*.end.json")):
        rank = int(file.name.removeprefix("rank-").partition(".")[0])
        end = attempt.read(f"rank-{rank}.end")
        node = attempt.node(rank)
        if end is None or end["code"] == 0 or end["stopped"] or not node:
            continue
        error = attempt.read(f"rank-{rank}.error") or {}
        lines = [str(error.get("message", "")), *_last_lines(attempt, rank)]
        for line in lines:
            if _FAULT.search(line):
                return node, f"rank {rank}: {line.strip()[:200]}"
    return None


def _last_lines(attempt: Attempt, rank: int) -> list[str]:
    """The end of a rank's log, the last line first."""
    log = attempt.run.log_file(attempt=attempt.number, rank=rank)
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return lines[: -_LINES - 1 : -1]


def note(experiment: Experiment, run: Run, *, node: str, cluster: str, reason: str, attempt: int) -> None:
    """Keep that a node failed a run; what is known of it already stays."""
    if any(bad.node == node for bad in noted(experiment, cluster=cluster)):
        return
    bad = BadNode(node=node, cluster=cluster, reason=reason, run=run.id, attempt=attempt, time=time.time())
    # Where it cannot be kept, say on a full disk, the failure counts as the run's.
    with suppress(OSError):
        _folder(experiment).mkdir(exist_ok=True)
        write_json(_file(experiment, node), {"format": FORMAT} | asdict(bad))


def noted(experiment: Experiment, *, cluster: str | None = None) -> list[BadNode]:
    """The nodes that have failed lately, the earliest first.

    Args:
        experiment: whose runs they failed.
        cluster: of this one only; None: of all.
    """
    found = []
    for file in _folder(experiment).glob("*.json"):
        try:
            content = read_json(file, newest_format=FORMAT)
            content.pop("format")
            bad = BadNode(**content)
        except (OSError, DamagedError, KeyError, TypeError):
            continue
        if time.time() - bad.time < SECONDS_LEFT_OUT and cluster in (None, bad.cluster):
            found.append(bad)
    return sorted(found, key=lambda bad: (bad.time, bad.node))


def left_out(bad: Sequence[BadNode], nodes: Collection[str], *, needed: int) -> list[str]:
    """The names of the bad nodes that can be left out, sorted.

    Args:
        bad: the earliest first; once the bound is met, later ones are not left out.
        nodes: of the partition that may be used at all.
        needed: as many nodes a job takes.
    """
    most = min(max(1, len(nodes) // _PART), _MOST, len(nodes) - needed)
    # A node that the cluster has no longer would make SLURM refuse the job.
    known = [each.node for each in bad if each.node in nodes]
    return sorted(known[: max(0, most)])


def remarks(experiment: Experiment) -> list[str]:
    """A line for people on each node that is left out."""
    return [
        f"Node {bad.node} is left out of new attempts until {_until(bad)}: {bad.reason} ({bad.run}, attempt "
        f"{bad.attempt}); to use it sooner: rm {_file(experiment, bad.node)}"
        for bad in noted(experiment)
    ]


def _until(bad: BadNode) -> str:
    return time.strftime("%F %H:%M", time.localtime(bad.time + SECONDS_LEFT_OUT))


def _folder(experiment: Experiment) -> Path:
    return experiment.folder / "bad-nodes"


def _file(experiment: Experiment, node: str) -> Path:
    return _folder(experiment) / f"{node}.json"
