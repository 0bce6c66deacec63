"""Nodes that made runs fail; later attempts exclude them.

    EXPERIMENT/bad-nodes/NODE.json   what happened, to which run, and when

A node is bad if SLURM says so (down, failing, not responding), or after an error of its GPU or driver (CUDA
cannot be initialised, uncorrectable ECC errors). Such a failure does not use up a retry while the node can be
excluded. The number of excluded nodes is limited, since a software error mistaken for a node's fault would
otherwise move from node to node forever.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from asyncpp_cli.atomic_files import write_record
from asyncpp_cli.errors import DamagedError
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import RankEnd, RankError, RankStart
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.run_folder import Run
from stages.records import FileRecord, read_record

EXCLUSION_SECONDS = 24 * 3600.0
"""Time for which a bad node is excluded; it may be repaired by then."""

_MAX_EXCLUDED = 8
_NODES_PER_EXCLUDED = 4
"""At most one node in this many is excluded, but always one."""

_LINES = 50
"""Lines to search at the end of a rank's log."""
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
"""Messages of CUDA, its driver and torch about faults of the hardware or driver (torch/cuda/__init__.py,
cudaGetErrorString, NVIDIA's Xid errors 48 and 79)."""


class BadNode(FileRecord, frozen=True, kw_only=True):
    """Content of a node's file."""

    node: str
    """SLURM's name."""
    cluster: str
    reason: str
    run: str
    """Id of the run that failed."""
    attempt: int
    time: float
    """Seconds since 1970."""


def node_fault(attempt: Attempt) -> tuple[str, str] | None:
    """The node whose fault made an attempt fail, with the message; None if it was no node's fault."""
    for rank, end in attempt.by_rank(RankEnd).items():
        start, error = attempt.read(RankStart, rank), attempt.read(RankError, rank)
        if end.code == 0 or end.stopped or start is None or not start.node:
            continue
        for line in ([] if error is None else [error.message]) + _last_lines(attempt, rank):
            if _FAULT.search(line):
                return start.node, f"rank {rank}: {line.strip()[:200]}"
    return None


def _last_lines(attempt: Attempt, rank: int) -> list[str]:
    """The last lines of a rank's log, in reverse order."""
    log = attempt.run.log_file(attempt=attempt.number, rank=rank)
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return lines[: -_LINES - 1 : -1]


def record_bad_node(
    experiment: Experiment, run: Run, *, node: str, cluster: str, reason: str, attempt: int
) -> None:
    """Record a bad node, unless it is recorded already."""
    if any(bad.node == node for bad in recent_bad_nodes(experiment, cluster=cluster)):
        return
    bad = BadNode(node=node, cluster=cluster, reason=reason, run=run.id, attempt=attempt, time=time.time())
    # If it cannot be recorded (full disk), the failure counts as the run's.
    with suppress(OSError):
        _folder(experiment).mkdir(exist_ok=True)
        write_record(_file(experiment, node), bad)


def recent_bad_nodes(experiment: Experiment, *, cluster: str | None = None) -> list[BadNode]:
    """Bad nodes recorded within the exclusion time, the earliest first.

    Args:
        experiment: the experiment.
        cluster: only nodes of this cluster; None: of all.
    """
    bad_nodes = []
    for file in _folder(experiment).glob("*.json"):
        try:
            bad = read_record(file, BadNode)
        except (OSError, DamagedError):
            continue
        if time.time() - bad.time < EXCLUSION_SECONDS and cluster in (None, bad.cluster):
            bad_nodes.append(bad)
    return sorted(bad_nodes, key=lambda bad: (bad.time, bad.node))


def excludable(bad: Sequence[BadNode], nodes: Collection[str], *, needed: int) -> list[str]:
    """Names of the bad nodes that can be excluded, sorted.

    Args:
        bad: bad nodes, the earliest first; the latest are dropped if there are too many.
        nodes: usable nodes of the partition.
        needed: nodes per job.
    """
    most = min(max(1, len(nodes) // _NODES_PER_EXCLUDED), _MAX_EXCLUDED, len(nodes) - needed)
    # SLURM refuses a job that excludes a node the cluster does not have.
    existing = [each.node for each in bad if each.node in nodes]
    return sorted(existing[: max(0, most)])


def exclusion_notes(experiment: Experiment) -> list[str]:
    """One line for each excluded node."""
    return [
        f"Node {bad.node} is excluded from new attempts until {_until(bad)}: {bad.reason} ({bad.run}, "
        f"attempt {bad.attempt}); to use it sooner: rm {_file(experiment, bad.node)}"
        for bad in recent_bad_nodes(experiment)
    ]


def _until(bad: BadNode) -> str:
    return time.strftime("%F %H:%M", time.localtime(bad.time + EXCLUSION_SECONDS))


def _folder(experiment: Experiment) -> Path:
    return experiment.folder / "bad-nodes"


def _file(experiment: Experiment, node: str) -> Path:
    return _folder(experiment) / f"{node}.json"
