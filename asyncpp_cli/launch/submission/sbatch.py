"""Submitting jobs through submitit, with the flags that the site profile adds or removes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.base.import_path import import_path_in_bash
from asyncpp_cli.launch.common.arrays import JobShape
from asyncpp_cli.launch.common.early_signals import SIGNAL_VARIABLE
from asyncpp_cli.launch.common.snapshot import interpreter
from asyncpp_cli.sites.profile import Site, setup_commands
from asyncpp_cli.slurm.client import SlurmError, error_text, run_command


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A job array, or a single job."""

    name: str
    shape: JobShape
    """Resources of each task."""
    command: str
    """What each task runs on its first node, in bash."""
    tasks: int | None = None
    """Number of tasks; None: a single job, no array."""
    at_once: int = 1
    """Tasks that may run at the same time."""
    code: str
    """Folder under EXPERIMENT/code with the code to run."""
    time: str = ""
    """Time limit, in sbatch's notation; empty: the site's."""
    after: Sequence[str] = ()
    """Ids of jobs that must have ended first, successfully or not."""
    output: str = "%A_%a.out"
    """File for its output, in sbatch's notation; relative, as SLURM would expand % patterns in the path."""


def small_job(name: str, command: Sequence[str], *, nodes: int = 1, **further: Any) -> BatchJob:
    """A job with one task per node, which runs a command on the first one; `further` fields as given."""
    shape = JobShape(nodes=nodes, tasks=nodes, tasks_per_node=1, cpus_per_task=1, gpus_per_node=0)
    return BatchJob(name=name, shape=shape, command=f"exec {shlex.join(command)}", **further)


def script(site: Site, folder: Path, job: BatchJob) -> str:
    """The script that `submit` hands to sbatch, for people to read."""
    return str(_executor(site, folder, job)._make_submission_file_text(job.command, "0"))


_KEY_OF_FLAG = {
    **{key: key for key in ("partition", "account", "qos", "constraint", "exclude")},
    "array": "max_parallel, array_limit",
    "cpus-per-task": "cpus_per_task",
    "mem": "memory",
    "gres": "gpus_per_node, gpu_type",
    "nodes": "gpus_per_node, cpus_per_node, tasks_per_node",
    "requeue": "remove_flags",
    "signal": "signal_lead",
    "time": "time, time_margin",
}
"""Keys of a site profile by the flag that they set."""


def annotated(script: str, site: Site) -> str:
    """A script for people to read: which key of the profile sets a flag stands beside it."""
    lines = []
    for line in script.split("\n"):
        key = "flags" if (flag := _flag_of(line)) in site.flags else _KEY_OF_FLAG.get(flag)
        lines.append(line if key is None else f"{line:<38}  # {key}")
    return "\n".join(lines)


def submit(site: Site, folder: Path, job: BatchJob) -> str:
    """Submit a job; SLURM's id for it.

    Args:
        site: site profile.
        folder: the submission's folder; working folder of the job.
        job: the job.

    Raises:
        SlurmError: sbatch refuses; the message is sbatch's.
    """
    from submitit.core.utils import FailedSubmissionError

    try:
        return str(_executor(site, folder, job)._submit_command(job.command))
    except FailedSubmissionError as error:
        raise SlurmError(f"sbatch: {error_text(str(error))}") from None


def check_folder_name(folder: Path) -> None:
    """Refuse a folder in which SLURM would not find a job's files: it expands patterns in their paths.

    Raises:
        UserError: the path has a pattern of file names (sbatch(1), FILENAME PATTERN), or a backslash.
    """
    path = str(folder.absolute())
    if found := re.search(r"\\|%[0-9AabJjNnstux%]", path):
        raise UserError(f"{path}: SLURM would expand {found[0]} in the path of a job; rename the folder")


def array_command(manifest: str) -> str:
    """The command of an array's tasks, which read this file in the submission's folder."""
    words = [interpreter(), "-P", "-u", "-m", "asyncpp_cli.launch.job.array_entry", manifest]
    # Until the program listens, signals are ignored rather than fatal.
    return f"trap '' TERM USR2; {SIGNAL_VARIABLE}=$asyncpp_told exec {shlex.join(words)}"


def _executor(site: Site, folder: Path, job: BatchJob) -> Any:
    from submitit import SlurmExecutor

    removed = set(site.remove_flags)

    class Executor(SlurmExecutor):
        """submitit's executor, for a shell command instead of a pickled function."""

        @classmethod
        def affinity(cls) -> int:
            # A script can be shown where there is no SLURM.
            return 1

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            lines = super()._make_submission_file_text(command, uid).split("\n")
            return "\n".join(line for line in lines if _flag_of(line) not in removed)

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            # Not in the script, where sbatch would split a path at its blanks.
            return ["sbatch", f"--chdir={folder}", str(submission_file_path)]

        def _submit_command(self, command: str) -> Any:
            path = folder / f"{job.name}.sh"
            path.write_text(self._make_submission_file_text(command, ""), encoding="utf-8")
            # Not ended for being slow: what it has submitted would not be known.
            said = run_command(self._make_submission_command(path), timeout=None)
            return self._get_job_id_from_submission_command(said)

    executor = Executor(folder=folder)
    named = {key: getattr(site, key) for key in ("partition", "account", "qos", "constraint", "exclude")}
    optional = named | {"mem": site.memory}
    executor.update_parameters(
        job_name=job.name,
        time=job.time or site.time,
        nodes=job.shape.nodes,
        ntasks_per_node=job.shape.tasks_per_node,
        cpus_per_task=job.shape.cpus_per_task,
        signal_delay_s=site.signal_lead,
        array_parallelism=job.at_once,
        wckey=None,
        use_srun=False,
        stderr_to_stdout=True,
        setup=_setup(site, code=job.code),
        additional_parameters=_additional_parameters(site, job),
        **{key: value for key, value in optional.items() if value is not None},
    )
    if job.tasks is not None:
        executor.parameters["map_count"] = job.tasks
    return executor


def _additional_parameters(site: Site, job: BatchJob) -> dict[str, Any]:
    per_node = job.shape.gpus_per_node
    gpus = f"{site.gpu_type}:{per_node}" if site.gpu_type else str(per_node)
    after = [f"afterany:{':'.join(job.after)}", *filter(None, [site.flags.get("dependency")])]
    return {
        "ntasks": job.shape.tasks,
        "output": job.output,
        "requeue": True,
        **({"gres": f"gpu:{gpus}"} if per_node else {}),
        **site.flags,
        **({"dependency": ",".join(after)} if job.after else {}),
    }


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


def _flag_of(line: str) -> str:
    match = re.match(r"#SBATCH --([a-z0-9-]+)", line)
    return match[1] if match else ""


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
