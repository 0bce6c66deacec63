"""Site profiles: where jobs run and which options that cluster needs. They do not affect run ids.

A profile is a YAML file: shipped under templates/sites, the user's own in ~/.config/asyncpp/sites (or under
XDG_CONFIG_HOME), or anywhere, by its path.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncpp_cli.errors import UserError
from asyncpp_cli.experiment.settings import SettingError, typed
from asyncpp_cli.experiment.shipped import find_template, template_names
from asyncpp_cli.experiment.yaml_data import read_mapping
from asyncpp_cli.launch.containers import Container, ContainerError, read_container

LOCAL = "local"

_FLAG = re.compile(r"[a-z][a-z0-9-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIME = re.compile(r"(\d+-)?\d{1,3}(:\d{1,2}){0,2}")
_MEMORY = re.compile(r"\d+[KMGT]?")
_NODES = re.compile(r"[A-Za-z0-9_.,\[\]-]+")
_INTERFACE = re.compile(r"[A-Za-z0-9_.:-]+")
_OURS = ("array", "chdir", "job-name", "nodes", "ntasks", "output", "error", "parsable", "wrap")
"""sbatch flags that asyncpp sets itself; a profile must not."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """A SLURM cluster. Every field is a key of a profile, except `name` and `file`."""

    name: str
    """Name of the file without its suffix."""
    file: Path
    description: str = ""
    scheduler: str = "slurm"
    """`slurm`; `local` only in the profile of that name."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    """Features that nodes must have, in sbatch's notation."""
    exclude: str | None = None
    """Nodes to exclude, in sbatch's notation: n[3-4],n7. See also `bad_nodes`."""
    gpus_per_node: int = 0
    """GPUs per node; each task takes one. 0: runs train on CPUs."""
    gpu_type: str | None = None
    """Type in `--gres=gpu:TYPE:N`."""
    cpus_per_node: int | None = None
    """CPUs per node, which limit the tasks per node. null: no limit."""
    tasks_per_node: int | None = None
    """Maximum number of tasks per node. null: no limit."""
    cpus_per_task: int | None = None
    """CPUs per rank; null: one per thread."""
    max_nodes: int | None = None
    """Maximum number of nodes per job."""
    memory: str | None = None
    """Memory per node, in sbatch's notation: 64G."""
    time: str = "24:00:00"
    """Time limit of a job, in quotes: "MINUTES", "HH:MM:SS" or "D-HH:MM:SS". A longer run resumes in the next
    job."""
    signal_lead: int = 120
    """Seconds before the time limit at which a job is signalled to save and requeue itself."""
    retries: int = 2
    """How often a failed run is started again. Preempted runs are always requeued."""
    max_parallel: int | None = None
    """Maximum number of runs at a time; null: no limit."""
    confirm_hours: int | None = None
    """Expected GPU-hours (core-hours on CPUs) above which `launch` asks; it also asks if they are unknown.
    null: never."""
    array_limit: int | None = None
    """Maximum number of tasks per array; null: SLURM's MaxArraySize."""
    submit_limit: int | None = None
    """Maximum number of your queued and running jobs, counting array tasks; null: no limit."""
    network_interface: str | None = None
    """Interface for traffic between nodes: ib0. null: chosen by gloo and NCCL."""
    setup: list[str] = field(default_factory=list)
    """Shell lines to run at the beginning of each job: module load ..."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of each job."""
    flags: dict[str, Any] = field(default_factory=dict)
    """sbatch flags to add or replace: {exclusive: true, licenses: "a:1"}."""
    remove_flags: list[str] = field(default_factory=list)
    """sbatch flags to remove because the site refuses them."""
    srun_flags: list[str] = field(default_factory=list)
    """Additional arguments of srun: [--mpi=none]."""
    container: Container | None = None
    """Container in which srun starts the ranks."""
    on_end: list[str] = field(default_factory=list)
    """Command to run when a launch has ended, as words: [notify-send, asyncpp]. On a cluster a last job runs
    it, or with --wait the command that waited. Its last word will be a sentence; ASYNCPP_FOLDER,
    ASYNCPP_COMPLETED and ASYNCPP_RUNS are in its environment."""
    run: dict[str, Any] = field(default_factory=dict)
    """Settings `site.*` (device, threads, timeout, grace, ...) that override those of the runs."""


_KEYS = {entry.name: entry for entry in dataclasses.fields(Site) if entry.name not in ("name", "file")}
_HINTS = typing.get_type_hints(Site)


def user_folder() -> Path:
    """Folder of the user's own profiles."""
    base = os.environ.get("XDG_CONFIG_HOME")
    # expanduser, unlike Path.expanduser, does not fail without a home folder (in a container).
    return Path(base or os.path.expanduser("~/.config")) / "asyncpp" / "sites"  # noqa: PTH111


def site_files() -> dict[str, Path]:
    """All named profiles; the user's take precedence over shipped ones."""
    shipped = {name: find_template("sites", name, beside=None) for name in template_names("sites")}
    own = {file.stem: file for file in sorted(user_folder().glob("*.yaml"))}
    return shipped | own


def find_site(name: str) -> Site:
    """The profile of that name, or in that file.

    Raises:
        UserError: there is none, or it is invalid.
    """
    files = site_files()
    if name in files:
        return read_site(files[name], name=name)
    path = Path(name)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return read_site(path, name=path.stem)
    raise UserError(
        f"--site {name}: unknown site; accepted: {', '.join(sorted(files))}, the path of a YAML file, or a "
        f"profile of your own as {user_folder() / (path.stem + '.yaml')}"
    )


def read_site(file: Path, *, name: str) -> Site:
    """The profile in a file.

    Raises:
        UserError: it is invalid; the message names file and key.
    """
    content = read_mapping(file)
    for key in content:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else f"accepted: {', '.join(_KEYS)}"
            raise UserError(f"{file}: {key}: unknown key; {hint}")
    values = {key: _typed(file, key, value) for key, value in content.items()}
    site = Site(name=name, file=file, **values)
    _check(site)
    return site


def _typed(file: Path, key: str, value: Any) -> Any:
    if key == "container" and value is not None:
        try:
            return read_container(value)
        except ContainerError as error:
            name = f"container.{error.key}" if error.key else key
            raise UserError(f"{file}: {name}: {error.message}") from None
    hint = _HINTS[key]
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if key == "time" and isinstance(value, int):
        message = 'put it in quotes: "HH:MM:SS" or "MINUTES" (without them YAML makes a number of 1:30:00)'
        raise UserError(f"{file}: {key}: {message}")
    origins = {typing.get_origin(kind) or kind for kind in kinds}
    if value is None and types.NoneType in origins:
        return None
    if dict in origins and isinstance(value, dict):
        return _texts(file, key, value) if key == "environment" else value
    if list in origins and isinstance(value, list):
        for entry in value:
            if not isinstance(entry, str):
                raise UserError(f"{file}: {key}: must be a list of texts, not {entry!r}")
        return value
    if str in origins and isinstance(value, str | int) and not isinstance(value, bool):
        return str(value)
    if int in origins and isinstance(value, int) and not isinstance(value, bool):
        return value
    accepted = {str: "text", int: "an integer", dict: "a mapping", list: "a list", types.NoneType: "null"}
    words = " or ".join(accepted[kind] for kind in accepted if kind in origins)
    raise UserError(f"{file}: {key}: must be {words}, not {value!r}")


def _texts(file: Path, key: str, value: dict[str, Any]) -> dict[str, str]:
    for name, entry in value.items():
        if not _VARIABLE.fullmatch(name):
            raise UserError(f"{file}: {key}: {name!r} is not a name of an environment variable")
        if isinstance(entry, bool | dict | list) or entry is None:
            raise UserError(f"{file}: {key}.{name}: must be text, not {entry!r}")
    return {name: str(entry) for name, entry in value.items()}


def _check(site: Site) -> None:
    def refuse(key: str, message: str) -> None:
        raise UserError(f"{site.file}: {key}: {message}")

    if site.scheduler not in ("slurm", LOCAL):
        refuse("scheduler", f"{site.scheduler!r} is not known; accepted: slurm")
    at_least_one = ("cpus_per_node", "tasks_per_node", "cpus_per_task", "max_nodes", "max_parallel")
    for key in (*at_least_one, "array_limit", "submit_limit"):
        if (value := getattr(site, key)) is not None and value < 1:
            refuse(key, f"must be at least 1, not {value}")
    for key in ("gpus_per_node", "retries", "confirm_hours"):
        if (value := getattr(site, key)) is not None and value < 0:
            refuse(key, f"must be at least 0, not {value}")
    if not _TIME.fullmatch(site.time):
        refuse("time", f"{site.time!r} is not a time; accepted: 'MINUTES', 'HH:MM:SS' or 'D-HH:MM:SS'")
    if site.memory is not None and not _MEMORY.fullmatch(site.memory):
        refuse("memory", f"{site.memory!r} is not an amount of memory; accepted: 64G, 900M")
    if site.network_interface is not None and not _INTERFACE.fullmatch(site.network_interface):
        refuse("network_interface", f"{site.network_interface!r} is not a name of an interface")
    if site.exclude is not None and not _NODES.fullmatch(site.exclude):
        refuse(
            "exclude", f"{site.exclude!r} is not a list of nodes; accepted, in sbatch's notation: n[3-4],n7"
        )
    for key in ("partition", "account", "qos", "constraint", "gpu_type"):
        if (text := getattr(site, key)) is not None and (not text or re.search(r"[\s\x00-\x1f]", text)):
            refuse(key, f"{text!r} is empty or contains white space")
    for line in site.setup:
        if "\n" in line:
            refuse("setup", "accepted: one line per entry")
    for name, value in site.flags.items():
        if not _FLAG.fullmatch(name) or isinstance(value, dict | list) or value in (None, False):
            refuse(
                "flags", f"{name}: accepted: a flag's name without its dashes, with text, a number or true"
            )
        if isinstance(value, str) and re.search(r"[\x00-\x1f]", value):
            refuse("flags", f"{name}: a control character in {value!r}")
    for name in (*site.flags, *site.remove_flags):
        if not _FLAG.fullmatch(name):
            refuse(
                "remove_flags", f"{name!r} is not the name of a flag; accepted: as in `wckey`, without dashes"
            )
        if name in _OURS:
            refuse("flags", f"{name} is set by asyncpp and cannot be changed")
    if site.on_end and not site.on_end[0]:
        refuse("on_end", "the first word is empty; accepted: a command and its arguments")
    for flag in site.srun_flags:
        if not flag.startswith("-"):
            refuse("srun_flags", f"{flag!r} is not a flag; accepted: --name=value")
    for key, value in site.run.items():
        try:
            site.run[key] = typed(f"site.{key}", value)
        except SettingError as error:
            refuse(f"run.{key}", str(error))
    grace = float(site.run.get("grace", 0.0))
    if site.scheduler == "slurm" and site.signal_lead < grace + 10:
        refuse(
            "signal_lead", f"{site.signal_lead} s are too few; accepted: at least run.grace ({grace:g}) + 10"
        )
