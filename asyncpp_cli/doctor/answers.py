"""What SLURM says of itself, taken apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from asyncpp_cli.cluster import slurm

WITHOUT_END = float("inf")


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
        """Whether jobs can be given it, now or later."""
        return not re.search(r"down|drain|fail|\*", self.state)


def configuration() -> dict[str, str]:
    """SLURM's settings (slurm.conf), by name.

    Raises:
        SlurmError: it does not answer.
    """
    return dict(re.findall(r"^(\w+)\s+= (.*?)\s*$", slurm.ask(["scontrol", "show", "config"]), re.MULTILINE))


def partitions() -> dict[str, dict[str, str]]:
    """The settings of each partition, by its name.

    Raises:
        SlurmError: SLURM does not answer.
    """
    lines = slurm.ask(["scontrol", "-o", "show", "partition"]).splitlines()
    found = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]
    return {partition["PartitionName"]: partition for partition in found if "PartitionName" in partition}


def nodes(partition: str) -> list[Node]:
    """The nodes of a partition.

    Raises:
        SlurmError: SLURM does not answer.
    """
    form = "%N|%c|%m|%G|%T"
    lines = slurm.ask(["sinfo", "-h", "-N", f"--partition={partition}", "-o", form]).splitlines()
    found = []
    for line in lines:
        name, cpus, memory, resources, state = line.split("|", 4)
        found.append(Node(name, _number(cpus), _number(memory), gpus_of(resources), state))
    return found


def chosen(partition: str | None, among: Mapping[str, Mapping[str, str]]) -> Mapping[str, str] | None:
    """The settings of a partition, of the default one if none is named; None if there is none."""
    if partition is not None:
        return among.get(partition)
    return next((each for each in among.values() if each.get("Default") == "YES"), None)


def _number(text: str) -> int:
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 0


def gpus_of(resources: str) -> int:
    """How many GPUs a node's resources have: `gpu:h100:8(S:0-1),nvme:1`."""
    return sum(int(count) for count in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", resources))


def seconds_of(time: str) -> float:
    """A time as SLURM writes it (`MINUTES`, `MINUTES:SS`, `HH:MM:SS`, `D-HH:MM:SS`), in seconds."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", time):
        return WITHOUT_END
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
    """An amount as sbatch takes it, in MB: `64G`; without a unit it is MB."""
    number, unit = int(memory.rstrip("KMGT")), memory[-1]
    return number * {"K": 1 / 1024, "G": 1024, "T": 1024**2}.get(unit, 1)


def associations(user: str) -> list[Mapping[str, str]]:
    """What the accounting lets a user do: each with `account`, `partition`, `qos` and `most` (jobs at once).

    Raises:
        SlurmError: there is no accounting.
    """
    form = "format=Account,Partition,QOS,MaxSubmitJobs"
    lines = slurm.ask(["sacctmgr", "-n", "-P", "show", "assoc", f"user={user}", form]).splitlines()
    keys = ("account", "partition", "qos", "most")
    return [dict(zip(keys, line.split("|"), strict=False)) for line in lines if line.strip()]


def most_jobs_of_qos() -> dict[str, str]:
    """How many jobs a user may have queued and running, by quality of service; empty where unbounded.

    Raises:
        SlurmError: there is no accounting.
    """
    lines = slurm.ask(["sacctmgr", "-n", "-P", "show", "qos", "format=Name,MaxSubmitJobsPU"]).splitlines()
    return dict(line.split("|", 1) for line in lines if "|" in line)
