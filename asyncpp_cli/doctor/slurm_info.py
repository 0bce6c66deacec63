"""Querying SLURM's partitions, nodes and accounts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from asyncpp_cli.launch.slurm import client as slurm

UNLIMITED = float("inf")


@dataclass(frozen=True)
class Node:
    """A node of a partition."""

    name: str
    cpus: int
    memory: int
    """MB."""
    gpus: int
    state: str

    @property
    def is_up(self) -> bool:
        """Whether it is available for jobs, now or later."""
        return not re.search(r"down|drain|fail|\*", self.state)


def partitions() -> dict[str, dict[str, str]]:
    """The settings of each partition, by its name.

    Raises:
        SlurmError: SLURM does not answer.
    """
    lines = slurm.run_command(["scontrol", "-o", "show", "partition"]).splitlines()
    found = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]
    return {partition["PartitionName"]: partition for partition in found if "PartitionName" in partition}


def nodes(partition: str) -> list[Node]:
    """The nodes of a partition.

    Raises:
        SlurmError: SLURM does not answer.
    """
    form = "%N|%c|%m|%G|%T"
    lines = slurm.run_command(["sinfo", "-h", "-N", f"--partition={partition}", "-o", form]).splitlines()
    found = []
    for line in lines:
        name, cpus, memory, resources, state = line.split("|", 4)
        found.append(Node(name, _number(cpus), _number(memory), gpus_of(resources), state))
    return found


def find_partition(partition: str | None, among: Mapping[str, Mapping[str, str]]) -> Mapping[str, str] | None:
    """Settings of a partition, None: the default one; returns None if it does not exist."""
    if partition is not None:
        return among.get(partition)
    return next((each for each in among.values() if each.get("Default") == "YES"), None)


def _number(text: str) -> int:
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 0


def gpus_of(resources: str) -> int:
    """Number of GPUs in a node's generic resources: `gpu:h100:8(S:0-1),nvme:1`."""
    return sum(int(count) for count in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", resources))


def seconds_of(time: str) -> float:
    """SLURM's time notation (`MINUTES`, `MINUTES:SS`, `HH:MM:SS`, `D-HH:MM:SS`) in seconds."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", time):
        return UNLIMITED
    days, _, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def megabytes_of(memory: str) -> float:
    """sbatch's memory notation (`64G`; MB without a unit) in MB."""
    number, unit = int(memory.rstrip("KMGT")), memory[-1]
    return number * {"K": 1 / 1024, "G": 1024, "T": 1024**2}.get(unit, 1)


def associations(user: str) -> list[Mapping[str, str]]:
    """A user's associations: each with `account`, `partition`, `qos` and `most` (maximum number of jobs).

    Raises:
        SlurmError: there is no accounting.
    """
    form = "format=Account,Partition,QOS,MaxSubmitJobs"
    lines = slurm.run_command(["sacctmgr", "-n", "-P", "show", "assoc", f"user={user}", form]).splitlines()
    keys = ("account", "partition", "qos", "most")
    return [dict(zip(keys, line.split("|"), strict=False)) for line in lines if line.strip()]


def max_jobs_of_qos() -> dict[str, str]:
    """Maximum number of a user's queued and running jobs, by QOS; empty if unlimited.

    Raises:
        SlurmError: there is no accounting.
    """
    lines = slurm.run_command(
        ["sacctmgr", "-n", "-P", "show", "qos", "format=Name,MaxSubmitJobsPU"]
    ).splitlines()
    return dict(line.split("|", 1) for line in lines if "|" in line)
