"""Comparing a site profile with what its cluster has and allows."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncpp_cli.doctor.checks import Check, good, wrong
from asyncpp_cli.launch.common.arrays import JobShape
from asyncpp_cli.launch.submission import sbatch
from asyncpp_cli.launch.submission.sbatch import BatchJob, profile_keys
from asyncpp_cli.runs.processes import user_name
from asyncpp_cli.sites.profile import Site, seconds_of, time_note
from asyncpp_cli.slurm import client as slurm
from asyncpp_cli.slurm.client import SlurmError
from stages.config.run_config import SiteConfig

_COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
_LOCAL_FILESYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs")


@dataclass(frozen=True)
class Node:
    """A node of a partition."""

    gpus: int
    state: str

    @property
    def is_up(self) -> bool:
        """Whether it is available for jobs, now or later."""
        return not re.search(r"down|drain|fail|\*", self.state)


def cluster_checks(site: Site, folder: Path) -> Iterator[Check]:
    """Checks of a cluster from this machine; no job is started.

    Args:
        site: site profile.
        folder: folder for experiments.
    """
    lacking = [command for command in _COMMANDS if shutil.which(command) is None]
    if lacking:
        advice = "log in where SLURM's commands are, or put them on PATH"
        yield wrong("slurm", f"not found: {', '.join(lacking)}", advice=advice)
        return
    try:
        config = slurm.configuration()
        known = partitions()
    except SlurmError as error:
        yield wrong("slurm", str(error), advice="check that the controller runs: scontrol ping")
        return
    yield good("slurm", f"{config.get('SLURM_VERSION', '?')}, cluster {config.get('ClusterName', '?')}")
    partition = find_partition(site.partition, known)
    yield partition_check(site, known)
    if partition is not None:
        yield nodes_check(site, nodes_of(partition["PartitionName"]))
        yield preemption_check(site, config, partition)
    yield requeue_check(site, config)
    yield _submit_limit(site)
    yield _accepted(site)
    yield _shared(folder)


def partitions() -> dict[str, dict[str, str]]:
    """The settings of each partition, by its name.

    Raises:
        SlurmError: SLURM does not answer.
    """
    lines = slurm.run_command(["scontrol", "--all", "--oneliner", "show", "partition"]).splitlines()
    found = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]
    return {partition["PartitionName"]: partition for partition in found if "PartitionName" in partition}


def find_partition(partition: str | None, among: Mapping[str, Mapping[str, str]]) -> Mapping[str, str] | None:
    """Settings of a partition, None: the default one; returns None if it does not exist."""
    if partition is not None:
        return among.get(partition)
    return next((each for each in among.values() if each.get("Default") == "YES"), None)


def nodes_of(partition: str) -> list[Node]:
    """The nodes of a partition.

    Raises:
        SlurmError: SLURM does not answer.
    """
    command = ["sinfo", "-h", "-N", f"--partition={partition}", "-o", "%G|%T"]
    return [Node(gpus_of(resources), state) for resources, state in slurm.rows(command, fields=2)]


def gpus_of(resources: str) -> int:
    """Number of GPUs in a node's generic resources: `gpu:h100:8(S:0-1),nvme:1`."""
    return sum(int(count) for count in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", resources))


def partition_check(site: Site, partitions: Mapping[str, Mapping[str, str]]) -> Check:
    """Whether the partition exists, is up, and allows the profile's time limit."""
    found = find_partition(site.partition, partitions)
    named = f"{site.file}: partition: "
    if found is None:
        detail = (
            f"there is no {site.partition}" if site.partition else "none is named, and there is no default"
        )
        return wrong("partition", detail, advice=f"{named}accepted: {', '.join(partitions)}")
    name, state, limit = found["PartitionName"], found.get("State", "?"), found.get("MaxTime", "")
    detail = f"{name} is {state.lower()}; {found.get('TotalNodes', '?')} nodes, time limit {limit.lower()}"
    if state != "UP":
        return wrong("partition", detail, advice=f"wait until it is up, or {named}another")
    if seconds_of(site.time) > seconds_of(limit):
        return wrong("partition", detail, advice=f'{site.file}: time: "{limit}" at most, not "{site.time}"')
    return good("partition", detail, note=time_note(site.time))


def nodes_check(site: Site, nodes: list[Node]) -> Check:
    """Whether nodes are available; a note if they have GPUs that the profile does not take."""
    up = [node for node in nodes if node.is_up]
    if not up:
        detail = f"none of {len(nodes)} is available"
        return wrong("nodes", detail, advice="see sinfo -R for why; or name another partition")
    gpus = max(node.gpus for node in up)
    detail = f"{len(up)} of {len(nodes)} are available, with up to {gpus} GPUs each"
    note = ""
    if gpus and not site.gpus_per_node:
        note = f"runs train on CPUs; for GPUs, {site.file}: gpus_per_node: {gpus}"
    return good("nodes", detail, note=note)


def _grace(site: Site) -> float:
    return float(site.run.get("grace", SiteConfig().grace))


def preemption_check(site: Site, config: Mapping[str, str], partition: Mapping[str, str]) -> Check:
    """Whether a preempted run has the time to save, and is requeued.

    Args:
        site: site profile.
        config: SLURM's settings.
        partition: settings of the profile's partition.
    """
    kind = config.get("PreemptType", "preempt/none")
    mode = partition.get("PreemptMode", config.get("PreemptMode", "OFF")).upper()
    if kind == "preempt/none" or mode == "OFF":
        return good("preemption", "jobs of this partition are not preempted")
    seconds = int(partition.get("GraceTime", "0"))
    signalled = "send_user_signal" in config.get("PreemptParameters", "")
    detail = f"{mode}, GraceTime {seconds} s, signal {'USR2' if signalled else 'TERM'}"
    if mode not in ("REQUEUE", "CANCEL"):
        note = "a run that is suspended for longer than site.timeout fails; launch again to resume"
        return good("preemption", detail, note=note)
    notes = []
    if seconds < _grace(site):
        notes.append(
            f"saving may take {_grace(site):g} s (run.grace): ask for a GraceTime as long, or shorten it; "
            "otherwise a preempted run resumes from its newest checkpoint"
        )
    if mode == "CANCEL":
        notes.append("SLURM does not requeue preempted jobs: launch again to resume")
    return good("preemption", detail, note="; ".join(notes))


def requeue_check(site: Site, config: Mapping[str, str]) -> Check:
    """Whether jobs can be requeued, and have the time to save when they are cancelled."""
    wait = re.match(r"\d+", config.get("KillWait", ""))
    seconds = int(wait[0]) if wait else 0
    detail = (
        f"JobRequeue {config.get('JobRequeue', '?')}, KillWait {seconds} s; "
        f"signalled {site.signal_lead} s before the time limit"
    )
    if "requeue" in site.remove_flags and config.get("JobRequeue") == "0":
        advice = f"{site.file}: remove_flags: do not remove requeue; without it no run is requeued"
        return wrong("requeue", detail, advice=advice)
    if seconds < _grace(site):
        note = (
            f"after scancel a run has KillWait to save; it may take {_grace(site):g} s (run.grace). "
            "`asyncpp cancel` waits for it"
        )
        return good("requeue", detail, note=note)
    return good("requeue", detail)


def _submit_limit(site: Site) -> Check:
    user, account = f"user={user_name()}", "format=Account,MaxSubmitJobs"
    try:
        of_user = slurm.run_command(["sacctmgr", "-n", "-P", "show", "assoc", user, account])
        of_qos = slurm.run_command(["sacctmgr", "-n", "-P", "show", "qos", "format=Name,MaxSubmitJobsPU"])
    except SlurmError as error:
        note = "" if site.submit_limit else f"if there is one, set {site.file}: submit_limit"
        return good("submit limit", f"unknown ({error})", note=note)
    limits = [line.split("|", 1) for line in of_user.splitlines() if "|" in line]
    bounds = [most for name, most in limits if site.account in (None, name)]
    bounds += [
        line.split("|", 1)[1] for line in of_qos.splitlines() if line.startswith(f"{site.qos or 'normal'}|")
    ]
    return submit_limit_check(site, bounds)


def submit_limit_check(site: Site, bounds: list[str]) -> Check:
    """Whether the profile respects the limits on a user's queued and running jobs; empty bounds are none."""
    limit = min((int(bound) for bound in bounds if bound.isdigit()), default=None)
    if limit is None:
        return good("submit limit", "none known")
    detail = f"{limit} jobs, counting array tasks"
    if site.submit_limit is None or site.submit_limit > limit:
        return wrong("submit limit", detail, advice=f"{site.file}: submit_limit: {limit}")
    return good("submit limit", f"{detail}; the profile says {site.submit_limit}")


def _accepted(site: Site) -> Check:
    """Whether sbatch accepts the script of the largest job that the profile allows; nothing is queued."""
    cpus = site.cpus_per_task or int(site.run.get("threads", 1))
    bounds = (site.gpus_per_node, site.tasks_per_node, (site.cpus_per_node or 0) // cpus)
    ranks, nodes = min((bound for bound in bounds if bound), default=1), site.max_nodes or 1
    shape = JobShape(
        nodes=nodes,
        tasks=ranks * nodes,
        tasks_per_node=ranks,
        cpus_per_task=cpus,
        gpus_per_node=ranks if site.gpus_per_node else 0,
    )
    job = BatchJob(name="asyncpp-doctor", shape=shape, tasks=1, code="", exclude=site.exclude or "")
    with tempfile.TemporaryDirectory(prefix="asyncpp-doctor-") as made:
        file = Path(made) / "job.sh"
        file.write_text(sbatch.array_script(site, Path(made), job))
        try:
            slurm.run_command(["sbatch", "--test-only", f"--chdir={made}", str(file)])
        except SlurmError as error:
            advice = f"change {site.file}: {profile_keys(str(error))}: sbatch refuses a job of {shape}"
            return wrong("submission", str(error), advice=advice)
    return good("submission", f"sbatch accepts a job of {shape} (--test-only)")


def _shared(folder: Path) -> Check:
    kind = _filesystem(folder.absolute())
    detail = f"{folder.absolute()} is on {kind or 'a filesystem of unknown kind'}"
    if kind in _LOCAL_FILESYSTEMS:
        note = "other machines may not see it; check with --job"
        return good("shared folder", detail, note=note)
    return good("shared folder", detail)


def _filesystem(folder: Path) -> str:
    """Type of the filesystem that a folder is on; empty if unknown."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    holding = [(len(mount[1]), mount[2]) for mount in mounts if folder.is_relative_to(mount[1])]
    return max(holding)[1] if holding else ""
