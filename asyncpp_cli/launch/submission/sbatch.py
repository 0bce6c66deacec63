"""Submitting jobs with sbatch, with the flags that the site profile adds or removes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.launch.common.arrays import JobShape
from asyncpp_cli.launch.common.early_signals import SIGNAL_VARIABLE
from asyncpp_cli.launch.common.snapshot import interpreter
from asyncpp_cli.sites.profile import Site, setup_commands
from asyncpp_cli.sites.resources import import_path_in_bash
from asyncpp_cli.slurm.client import SlurmError, error_text, run_command


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A job array, or a single job."""

    name: str
    shape: JobShape
    """Resources of each task."""
    tasks: int | None
    """Number of tasks; None: a single job, no array."""
    at_once: int = 1
    """Tasks that may run at the same time."""
    code: str
    """Folder under EXPERIMENT/code with the code to run."""
    manifest: str = ""
    """Manifest that the tasks read, in the submission's folder."""
    exclude: str = ""
    """Nodes to exclude, in sbatch's notation."""
    output: str = "%A_%a.out"
    """File for its output, in sbatch's notation; relative, because SLURM expands % patterns in the path."""


def array_script(site: Site, job: BatchJob) -> str:
    """The script that `submit_array` hands to sbatch, for people to read."""
    return _script(site, job, _array_command(job.manifest), after=())


def submit_array(site: Site, folder: Path, job: BatchJob, *, after: str | None) -> str:
    """Submit one array; SLURM's id for it.

    Args:
        site: site profile.
        folder: the submission's folder; working folder of the jobs.
        job: the array.
        after: id of an array that must have ended first, successfully or not.

    Raises:
        SlurmError: sbatch refuses; the message is sbatch's.
    """
    script = _script(site, job, _array_command(job.manifest), after=() if after is None else (after,))
    return _submitted(script, folder, job.name)


def submit_job(
    site: Site,
    folder: Path,
    *,
    name: str,
    nodes: int,
    command: Sequence[str],
    after: Sequence[str],
    code: str,
    output: str,
) -> str:
    """Submit a small job with one task per node; SLURM's id for it.

    Args:
        site: site profile.
        folder: the submission's folder; working folder of the job.
        name: name of the job.
        nodes: number of nodes.
        command: command to run on the first node.
        after: ids of jobs that must have ended first, successfully or not.
        code: folder under EXPERIMENT/code with the code to run.
        output: name of the file for its output, in sbatch's notation.

    Raises:
        SlurmError: sbatch refuses; the message is sbatch's.
    """
    shape = JobShape(nodes=nodes, tasks=nodes, tasks_per_node=1, cpus_per_task=1, gpus_per_node=0)
    job = BatchJob(name=name, shape=shape, tasks=None, code=code, exclude=site.exclude or "", output=output)
    return _submitted(_script(site, job, f"exec {shlex.join(command)}", after=after), folder, name)


def check_folder_name(folder: Path) -> None:
    """Refuse a folder in which SLURM would not find a job's files: it expands patterns in their paths.

    Raises:
        UserError: the path has a pattern of file names (sbatch(1), FILENAME PATTERN), or a backslash.
    """
    path = str(folder.absolute())
    if found := re.search(r"\\|%[0-9AabJjNnstux%]", path):
        raise UserError(f"{path}: SLURM would expand {found[0]} in the path of a job; rename the folder")


def _array_command(manifest: str) -> str:
    words = [interpreter(), "-P", "-u", "-m", "asyncpp_cli.launch.job.array_entry", manifest]
    # Until the program listens, signals are ignored rather than fatal.
    return f"trap '' TERM USR2; {SIGNAL_VARIABLE}=$asyncpp_told exec {shlex.join(words)}"


def _script(site: Site, job: BatchJob, command: str, *, after: Sequence[str]) -> str:
    """A job's script; `after`: ids of jobs that must have ended first, besides those of the site's flags."""
    shape = job.shape
    gpus = f"{site.gpu_type}:{shape.gpus_per_node}" if site.gpu_type else str(shape.gpus_per_node)
    options: dict[str, Any] = {
        "job_name": job.name,
        "time": site.time,
        "nodes": shape.nodes,
        "ntasks": shape.tasks,
        "ntasks_per_node": shape.tasks_per_node,
        "cpus_per_task": shape.cpus_per_task,
        "gres": f"gpu:{gpus}" if shape.gpus_per_node else None,
        "mem": site.memory,
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "exclude": job.exclude or None,
        "array": None if job.tasks is None else f"0-{job.tasks - 1}%{min(job.tasks, job.at_once)}",
        "signal": f"USR2@{site.signal_lead}",
        "output": job.output,
        "open-mode": "append",
        "requeue": True,
    }
    options = {name: value for name, value in options.items() if value is not None} | site.flags
    if after:
        of_site = [options["dependency"]] if "dependency" in options else []
        options["dependency"] = ",".join([f"afterany:{':'.join(after)}", *of_site])
    flags = [(name.replace("_", "-"), value) for name, value in sorted(options.items())]
    lines = [
        f"#SBATCH --{name}" + ("" if value is True else f"={shlex.quote(str(value))}")
        for name, value in flags
        if name not in site.remove_flags
    ]
    setup = _setup(site, code=job.code)
    return "\n".join(
        ["#!/bin/bash", "", "# Parameters", *lines, "", "# setup", *setup, "", "# command", command, ""]
    )


def _setup(site: Site, *, code: str) -> list[str]:
    return [
        "asyncpp_folder=$PWD asyncpp_told=",
        "trap 'asyncpp_told=SIGTERM' TERM",
        "trap 'asyncpp_told=SIGUSR2' USR2",
        # A signal to the job may have ended a command: its program then sees to that.
        'asyncpp_check() { [ "$1" = 0 ] || [ "$asyncpp_told" ] || '
        '{ echo "$2 failed with exit code $1" >&2; exit 1; }; }',
        *(
            line
            for name, value in site.environment.items()
            for line in (
                f"export {name}={shlex.quote(str(value))}",
                f"asyncpp_check $? 'setting {name} (environment of the site)'",
            )
        ),
        *(
            line
            for command in setup_commands(site.setup)
            for line in (command, f"asyncpp_check $? {shlex.quote(f'{command} (setup of the site)')}")
        ),
        'cd -- "$asyncpp_folder" || exit 1',
        # Relative: an absolute path may contain a colon.
        *import_path_in_bash(f"../../code/{code}"),
        "export PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1",
    ]


def _submitted(script: str, folder: Path, name: str) -> str:
    """Submit a script; SLURM's id for the job."""
    path = folder / f"{name}.sh"
    path.write_text(script, encoding="utf-8")
    # The folder is not in the script, where sbatch would split its path at blanks. Not ended for being slow:
    # what it has submitted would not be known.
    said = run_command(["sbatch", f"--chdir={folder}", str(path)], timeout=None)
    if (submitted := re.search(r"job (\d+)", said)) is None:
        raise SlurmError(f"sbatch: no id of a job in its answer: {error_text(said)}")
    return submitted[1]


_KEYS = (
    ("maxsubmit|maxjobs|too many jobs", ("submit_limit",)),
    ("maxwall", ("time", "qos")),
    ("invalid account|association", ("account", "partition", "qos")),
    # After SLURM's name of the limit that is violated, where it gives one.
    ("accounting/qos policy", ("submit_limit", "qos", "account", "time")),
    ("partition", ("partition",)),
    ("qos", ("qos",)),
    ("account", ("account", "qos")),
    ("job ?array|array (index|size|spec)|invalid job array", ("array_limit",)),
    ("submit limit|job limit", ("submit_limit",)),
    ("time limit|timelimit|invalid time", ("time",)),
    ("memory", ("memory",)),
    ("gres|gpu", ("gpus_per_node", "gpu_type")),
    ("feature|constraint", ("constraint",)),
    ("licen[sc]e", ("flags",)),
    ("reservation", ("flags",)),
    ("node name", ("exclude",)),
    ("node count", ("max_nodes", "tasks_per_node", "partition")),
    ("cpu count|cpus per|more processors", ("cpus_per_task", "cpus_per_node", "tasks_per_node")),
    (
        "node configuration|not available",
        ("cpus_per_task", "cpus_per_node", "tasks_per_node", "gpus_per_node", "memory", "constraint"),
    ),
    ("unrecognized option|invalid option|ambiguous", ("flags", "remove_flags")),
    ("dependency", ("flags",)),
)
"""Patterns of SLURM's messages with the keys concerned; the first match counts."""


def profile_keys(message: str) -> str:
    """The keys of a site profile that may be the cause of a refusal, comma-separated.

    Args:
        message: SLURM's message.
    """
    for words, keys in _KEYS:
        if re.search(words, message, re.IGNORECASE):
            return ", ".join(keys)
    return "partition, account, qos, time, memory, flags"
