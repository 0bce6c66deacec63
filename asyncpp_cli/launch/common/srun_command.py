"""The srun command that starts the ranks of a job."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncpp_cli.experiment.run_data import config_to_train
from asyncpp_cli.launch.common.arrays import ArrayManifest, JobShape
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.sites.profile import Site


def srun_command(
    run: Run,
    of: Site | ArrayManifest,
    *,
    attempt: int,
    shape: JobShape,
    site_settings: Mapping[str, Any],
    folder: Path,
    environment: Mapping[str, str],
) -> list[str]:
    """The command, as words.

    Args:
        run: the run.
        of: the site, or what the manifest has of it: flags of srun, and how Python is started.
        attempt: number of the attempt.
        shape: resources of the job.
        site_settings: settings `site.*` that override the run's.
        folder: working folder of the job.
        environment: variables of the ranks (`python_words`).

    Raises:
        DamagedError: the run's configuration cannot be read.
    """
    config = config_to_train(run)
    site = replace(config.site, **site_settings)
    return [
        "srun",
        f"--ntasks={shape.tasks}",
        f"--cpus-per-task={shape.cpus_per_task}",
        # Ends the other ranks, should they not notice by themselves that one is gone.
        "--kill-on-bad-exit=1",
        f"--wait={round(site.grace) + 60}",
        "--export=ALL",
        "--unbuffered",
        *of.srun_flags,
        *python_words(of.command_prefix, of.python, folder=folder, environment=environment),
        *["-P", "-m", "asyncpp_cli.launch.common.supervisor"],
        *[str(run.folder), str(attempt)],
    ]


def python_words(
    prefix: str, python: str | None, *, folder: Path, environment: Mapping[str, str]
) -> list[str]:
    """Words that start Python for a rank.

    Args:
        prefix: `command_prefix` of the site.
        python: interpreter; None: this one.
        folder: working folder of the job, where `PYTHONPATH` may begin with a relative path.
        environment: variables of the ranks; in an image, where another interpreter is named, those of Python
            and of the network replace the image's own.
    """
    words = shlex.split(prefix)
    if python is None:
        return [*words, sys.executable]
    kept = {name: environment[name] for name in _PASSED_ON if name in environment}
    first, _, rest = kept.get("PYTHONPATH", "").partition(os.pathsep)
    if first.startswith("..") and os.pathsep not in str(folder):
        # In an image the job's working folder may be another.
        code = os.path.normpath(folder / first)
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, (code, rest)))
    # Packages in the home folder are for the host's Python.
    variables = [f"{name}={value}" for name, value in kept.items()]
    return [*words, "env", "-u", "PYTHONHOME", *variables, "PYTHONNOUSERSITE=1", python]


_PASSED_ON = (
    *("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
)


def network_variables(interface: str | None) -> dict[str, str]:
    """Variables that choose the network interface of gloo and NCCL; None: their own choice."""
    if interface is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
