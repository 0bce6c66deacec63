"""Comparing a site profile with what its cluster has and allows."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from asyncpp_cli.doctor import slurm_info
from asyncpp_cli.doctor.checks import Check, good, wrong
from asyncpp_cli.doctor.preemption import preemption_check, requeue_check
from asyncpp_cli.launch.sites import Site
from asyncpp_cli.launch.slurm import client as slurm
from asyncpp_cli.launch.slurm import nodes as slurm_nodes
from asyncpp_cli.launch.slurm.client import SlurmError
from asyncpp_cli.launch.submission import sbatch
from asyncpp_cli.launch.submission.array_plan import array_size
from asyncpp_cli.launch.submission.job_shape import JobShape
from asyncpp_cli.launch.submission.sbatch import BatchJob
from asyncpp_cli.runs.processes import user_name

_COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
_LOCAL_FILESYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs")


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
        partitions = slurm_info.partitions()
    except SlurmError as error:
        yield wrong("slurm", str(error), advice="check that the controller runs: scontrol ping")
        return
    yield good("slurm", f"{config.get('SLURM_VERSION', '?')}, cluster {config.get('ClusterName', '?')}")
    partition = slurm_info.find_partition(site.partition, partitions)
    yield partition_check(site, partitions)
    if partition is not None:
        yield nodes_check(site, slurm_info.nodes(partition["PartitionName"]))
        yield preemption_check(site, config, partition)
    if site.exclude:
        yield exclude_check(site)
    yield requeue_check(site, config)
    yield from _account_checks(site, config)
    yield array_check(site, config)
    yield _accounting(config)
    yield _accepted(site)
    yield _shared(folder)


def partition_check(site: Site, partitions: Mapping[str, Mapping[str, str]]) -> Check:
    """Whether the partition exists, is up, and allows the profile's time limit."""
    found = slurm_info.find_partition(site.partition, partitions)
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
    if slurm_info.seconds_of(site.time) > slurm_info.seconds_of(limit):
        return wrong("partition", detail, advice=f'{site.file}: time: "{limit}" at most, not "{site.time}"')
    return good("partition", detail)


def nodes_check(site: Site, nodes: list[slurm_info.Node]) -> Check:
    """Whether nodes have the resources that the profile takes."""
    up = [node for node in nodes if node.is_up]
    if not up:
        detail = f"none of {len(nodes)} is available"
        return wrong("nodes", detail, advice="see sinfo -R for why; or name another partition")
    most = {
        "gpus_per_node": max(node.gpus for node in up),
        "cpus_per_node": max(node.cpus for node in up),
        "memory": max(node.memory for node in up),
    }
    detail = (
        f"{len(up)} of {len(nodes)} are available; the largest has {most['cpus_per_node']} CPUs, "
        f"{most['memory'] / 1024:.0f} GiB, {most['gpus_per_node']} GPUs"
    )
    cpus = _full_node(site).tasks * _full_node(site).cpus_per_task
    asked = {
        "gpus_per_node": site.gpus_per_node,
        "cpus_per_node": site.cpus_per_node or 0,
        "memory": slurm_info.megabytes_of(site.memory) if site.memory else 0,
    }
    for key, wanted in asked.items():
        if wanted > most[key]:
            unit = "M" if key == "memory" else ""
            return wrong("nodes", detail, advice=f"{site.file}: {key}: {most[key]}{unit} at most")
    if cpus > most["cpus_per_node"]:
        ranks = _full_node(site).tasks
        advice = (
            f"{site.file}: cpus_per_task: {most['cpus_per_node'] // ranks} at most for {ranks} ranks per node"
        )
        return wrong("nodes", detail, advice=advice)
    if most["gpus_per_node"] and not site.gpus_per_node:
        note = f"runs train on CPUs; for GPUs, {site.file}: gpus_per_node: {most['gpus_per_node']}"
        return good("nodes", detail, note=note)
    if site.max_nodes is not None and site.max_nodes > len(nodes):
        return wrong("nodes", detail, advice=f"{site.file}: max_nodes: {len(nodes)} at most")
    fit = [node for node in up if node.memory >= asked["memory"]]
    if len(fit) < min(site.max_nodes or 1, len(up)):
        memory = sorted((node.memory for node in up), reverse=True)[: site.max_nodes][-1]
        advice = (
            f"{site.file}: memory: {memory}M at most for jobs of {site.max_nodes} nodes, "
            f"or max_nodes: {len(fit)}, as many as have {site.memory}"
        )
        return wrong("nodes", detail, advice=advice)
    if len(fit) < len(up):
        return good("nodes", detail, note=f"{len(fit)} of {len(up)} have {site.memory} ({site.file}: memory)")
    return good("nodes", detail)


def exclude_check(site: Site) -> Check:
    """Whether the cluster has the nodes that the profile excludes: sbatch refuses other names."""
    excluded = site.exclude or ""
    try:
        unknown = sorted(set(slurm_nodes.names(excluded)) - slurm_nodes.of_cluster())
    except SlurmError as error:
        return wrong("exclude", str(error), advice=f"{site.file}: exclude: accepted: as n[3-4],n7")
    if unknown:
        advice = (
            f"{site.file}: exclude: the cluster has no {', '.join(unknown)}, and sbatch refuses such names"
        )
        return wrong("exclude", excluded, advice=advice)
    return good("exclude", excluded)


def _full_node(site: Site) -> JobShape:
    """A job with as many ranks as fit on a node."""
    cpus = site.cpus_per_task or int(site.run.get("threads", 1))
    bounds = [
        bound
        for bound in (site.gpus_per_node, site.tasks_per_node, (site.cpus_per_node or 0) // cpus)
        if bound
    ]
    ranks = min(bounds, default=1)
    gpus = ranks if site.gpus_per_node else 0
    return JobShape(nodes=1, tasks=ranks, tasks_per_node=ranks, cpus_per_task=cpus, gpus_per_node=gpus)


def _account_checks(site: Site, config: Mapping[str, str]) -> Iterator[Check]:
    try:
        mine = slurm_info.associations(user_name())
        most_of_qos = slurm_info.max_jobs_of_qos()
    except SlurmError as error:
        yield good("account", f"unknown ({error})")
        if site.submit_limit is None:
            note = f"if there is one, set {site.file}: submit_limit"
            yield good("submit limit", "unknown", note=note)
        return
    yield account_check(site, mine, enforced=config.get("AccountingStorageEnforce", "none"))
    yield submit_limit_check(site, mine, most_of_qos)


def account_check(site: Site, mine: list[Mapping[str, str]], *, enforced: str) -> Check:
    """Whether the user may use the profile's account and quality of service."""
    accounts = sorted({each["account"] for each in mine})
    services = sorted({name for each in mine for name in each["qos"].split(",") if name})
    detail = f"yours: {', '.join(accounts) or 'none'}; QOS: {', '.join(services) or 'none'}"
    for key, value, accepted in (("account", site.account, accounts), ("qos", site.qos, services)):
        if value is not None and value not in accepted:
            advice = f"{site.file}: {key}: {value} is not yours; accepted: {', '.join(accepted) or 'none'}"
            if enforced in ("none", "(null)", ""):
                return good("account", detail, note=f"{advice} (not enforced here)")
            return wrong("account", detail, advice=advice)
    return good("account", detail)


def submit_limit_check(site: Site, mine: list[Mapping[str, str]], most_of_qos: Mapping[str, str]) -> Check:
    """Whether the profile respects the limit on a user's jobs."""
    account = [each for each in mine if site.account in (None, each["account"])]
    bounds = [each["most"] for each in account] + [most_of_qos.get(site.qos or "normal", "")]
    limit = min((int(bound) for bound in bounds if bound.isdigit()), default=None)
    if limit is None:
        return good("submit limit", "none known")
    detail = f"{limit} jobs, counting array tasks"
    if site.submit_limit is None or site.submit_limit > limit:
        return wrong("submit limit", detail, advice=f"{site.file}: submit_limit: {limit}")
    return good("submit limit", f"{detail}; the profile says {site.submit_limit}")


def array_check(site: Site, config: Mapping[str, str]) -> Check:
    """Size of job arrays."""
    size = slurm.max_array_size(config)
    if size < 2:
        return wrong(
            "arrays", "job arrays are switched off (MaxArraySize)", advice="ask for MaxArraySize > 1"
        )
    if site.array_limit is not None and site.array_limit > size:
        return good(
            "arrays", f"of {size} tasks", note=f"{site.file}: array_limit: {site.array_limit} has no effect"
        )
    return good("arrays", f"of {array_size(site, size)} tasks; more runs become several arrays")


def _accounting(config: Mapping[str, str]) -> Check:
    try:
        slurm.run_command(["sacct", "-n", "-X", "--format=JobID"])
    except SlurmError as error:
        note = "for ended jobs, status only shows what the runs themselves wrote; nothing else is missing"
        return good("accounting", f"none ({error})", note=note)
    return good("accounting", f"sacct answers ({config.get('AccountingStorageType', '?')})")


def _accepted(site: Site) -> Check:
    """Whether sbatch accepts the script of a job that fills a node; nothing is queued."""
    with tempfile.TemporaryDirectory(prefix="asyncpp-doctor-") as made:
        folder = Path(made)
        shape = _full_node(site)
        file = folder / "job.sh"
        file.write_text(
            sbatch.array_script(site, folder, BatchJob(name="asyncpp-doctor", shape=shape, tasks=1, code=""))
        )
        try:
            with slurm.clean_environment():
                slurm.run_command(["sbatch", "--test-only", f"--chdir={folder}", str(file)])
        except SlurmError as error:
            advice = f"change {site.file}: sbatch refuses its jobs"
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
