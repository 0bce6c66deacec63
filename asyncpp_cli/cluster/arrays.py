"""Submitting job arrays, through submitit: its script, with what a site wants added or left out."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncpp_cli.cluster.shapes import Shape
from asyncpp_cli.cluster.sites import Site
from asyncpp_cli.cluster.slurm import SlurmError, clean_environment, own_words
from asyncpp_cli.cluster.snapshot import interpreter
from asyncpp_cli.cluster.told import TOLD_VARIABLE


def script_of(
    site: Site,
    folder: Path,
    *,
    name: str,
    shape: Shape,
    tasks: int,
    at_once: int,
    code: str,
    file: str,
    exclude: str = "",
) -> str:
    """The script that `submit` hands to sbatch, to be read by people."""
    executor = _executor(
        site, folder, name=name, shape=shape, tasks=tasks, at_once=at_once, code=code, exclude=exclude
    )
    return str(executor._make_submission_file_text(_batch_command(file), "0"))


def submit(
    site: Site,
    folder: Path,
    *,
    name: str,
    shape: Shape,
    tasks: int,
    at_once: int,
    after: str | None,
    code: str,
    file: str,
    exclude: str = "",
) -> str:
    """Submit one array. SLURM's number for it.

    Args:
        site: where.
        folder: of the submission; the jobs begin there.
        name: of the job.
        shape: what each task takes.
        tasks: number of them.
        at_once: of them that may run together.
        after: SLURM's number of an array that must have ended before, however it did.
        code: folder under EXPERIMENT/code that they run.
        file: what they read, in `folder`.
        exclude: nodes that they are not to get, as sbatch takes them.

    Raises:
        SlurmError: sbatch refuses; the message is its own.
    """
    executor = _executor(
        site, folder, name=name, shape=shape, tasks=tasks, at_once=at_once, code=code, exclude=exclude
    )
    if after is not None:
        _begin_after(executor, [after])
    return _submitted(executor, _batch_command(file))


def submit_single(
    site: Site,
    folder: Path,
    *,
    name: str,
    nodes: int,
    command: Sequence[str],
    after: Sequence[str],
    code: str,
) -> str:
    """Submit a small job that begins when others have ended, however they did. SLURM's number for it.

    Args:
        site: where.
        folder: of the submission; the job begins there.
        name: of the job.
        nodes: of the job, with a place for one task on each.
        command: what it runs, on the first of them.
        after: SLURM's numbers of the others; none: it begins as soon as it can.
        code: folder under EXPERIMENT/code that it runs.

    Raises:
        SlurmError: sbatch refuses; the message is its own.
    """
    shape = Shape(nodes=nodes, tasks=nodes, tasks_per_node=1, cpus_per_task=1, gpus_per_node=0)
    executor = _executor(
        site, folder, name=name, shape=shape, tasks=None, at_once=1, code=code, exclude=site.exclude or ""
    )
    if after:
        _begin_after(executor, after)
    executor.parameters["additional_parameters"]["output"] = "report-%j.out"
    return _submitted(executor, f"exec {shlex.join(command)}")


def _begin_after(executor: Any, others: Sequence[str]) -> None:
    """Have a job wait until others have ended, beside what the site makes it wait for."""
    further = executor.parameters["additional_parameters"]
    sites_own = [further["dependency"]] if "dependency" in further else []
    further["dependency"] = ",".join([f"afterany:{':'.join(others)}", *sites_own])


def _batch_command(file: str) -> str:
    words = [interpreter(), "-P", "-u", "-m", "asyncpp_cli.cluster.array_task", file]
    # A signal that is ignored here is ignored until the program listens, instead of ending it.
    return f"trap '' TERM USR2; {TOLD_VARIABLE}=$asyncpp_told exec {shlex.join(words)}"


def _executor(
    site: Site,
    folder: Path,
    *,
    name: str,
    shape: Shape,
    tasks: int | None,
    at_once: int,
    code: str,
    exclude: str,
) -> Any:
    from submitit import SlurmExecutor
    from submitit.core import utils

    removed = set(site.remove_flags)

    class Executor(SlurmExecutor):
        """submitit's, for a command instead of a pickle: a job does what its folder says when it begins."""

        @classmethod
        def affinity(cls) -> int:
            # Without SLURM a script can still be shown.
            return 1

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            lines = super()._make_submission_file_text(command, uid).split("\n")
            return "\n".join(line for line in lines if _flag_of(line) not in removed)

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            # Here and not in the script: there sbatch would split a path at its blanks.
            return ["sbatch", f"--chdir={folder}", str(submission_file_path)]

        def _submit_command(self, command: str) -> Any:
            path = folder / f"{name}.sh"
            path.write_text(self._make_submission_file_text(command, ""), encoding="utf-8")
            call = utils.CommandFunction(self._make_submission_command(path), verbose=False)
            return self._get_job_id_from_submission_command(call())

    executor = Executor(folder=folder)
    optional = {
        key: value
        for key, value in {
            "partition": site.partition,
            "account": site.account,
            "qos": site.qos,
            "constraint": site.constraint,
            "mem": site.memory,
            "exclude": exclude or None,
        }.items()
        if value is not None
    }
    executor.update_parameters(
        job_name=name,
        time=site.time,
        nodes=shape.nodes,
        ntasks_per_node=shape.tasks_per_node,
        cpus_per_task=shape.cpus_per_task,
        signal_delay_s=site.signal_lead,
        array_parallelism=at_once,
        wckey=None,
        use_srun=False,
        stderr_to_stdout=True,
        setup=_setup(site, code=code),
        additional_parameters=_further(site, shape),
        **optional,
    )
    if tasks is not None:
        executor.parameters["map_count"] = tasks
    return executor


def _further(site: Site, shape: Shape) -> dict[str, Any]:
    gpus = f"{site.gpu_type}:{shape.gpus_per_node}" if site.gpu_type else str(shape.gpus_per_node)
    return {
        "ntasks": shape.tasks,
        # Relative, so that no path of the user's is read as one of SLURM's patterns.
        "output": "%A_%a.out",
        "requeue": True,
        **({"gres": f"gpu:{gpus}"} if shape.gpus_per_node else {}),
        **site.flags,
    }


def _setup(site: Site, *, code: str) -> list[str]:
    return [
        "asyncpp_folder=$PWD asyncpp_told=",
        "trap 'asyncpp_told=SIGTERM' TERM",
        "trap 'asyncpp_told=SIGUSR2' USR2",
        *(f"export {name}={shlex.quote(value)}" for name, value in site.environment.items()),
        *site.setup,
        'cd -- "$asyncpp_folder" || exit 1',
        # Relative: a path with a colon in it cannot stand here.
        f"export PYTHONPATH=../../code/{code}${{PYTHONPATH:+:$PYTHONPATH}}",
        "export PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1",
    ]


def _flag_of(line: str) -> str:
    match = re.match(r"#SBATCH --([a-z0-9-]+)", line)
    return match[1] if match else ""


def _submitted(executor: Any, command: str) -> str:
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        # submitit prints what sbatch says beside raising it.
        with clean_environment(), contextlib.redirect_stderr(io.StringIO()):
            return str(executor._submit_command(command))
    except (FailedJobError, FailedSubmissionError) as error:
        raise SlurmError(f"sbatch: {own_words(str(error))}") from None
    except FileNotFoundError:
        raise SlurmError("there is no SLURM here: sbatch is not found") from None
