"""Site profiles: where jobs run and which options that cluster needs. They do not affect run ids.

A profile is a YAML file: shipped under templates/sites, the user's own in ~/.config/asyncpp/sites (or under
XDG_CONFIG_HOME), or anywhere, by its path.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from asyncpp_cli.base.console import refuse_all
from asyncpp_cli.base.errors import DamagedError, UserError
from asyncpp_cli.experiment.interpolation import resolved_file
from asyncpp_cli.experiment.shipped import find_template, not_found, template_names
from asyncpp_cli.experiment.yaml_data import read_mapping
from asyncpp_cli.runs.settings import SettingError, holds_text, typed
from asyncpp_cli.sites import sbatch_flags
from stages.config.records import Count, Meta, converted

LOCAL = "local"

_FLAG = re.compile(r"[a-z][a-z0-9-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIME = Meta(pattern=rf"\A{sbatch_flags.TIME}\Z", description="'MINUTES', 'HH:MM:SS', 'D-HH:MM:SS'")
_MEMORY = Meta(pattern=rf"\A{sbatch_flags.MEMORY}\Z", description="an amount of memory: 64G, 900M")
_NODES = Meta(pattern=r"\A[A-Za-z0-9_.,\[\]-]+\Z", description="nodes in sbatch's notation: n[3-4],n7")
_INTERFACE = Meta(pattern=r"\A[A-Za-z0-9_.:-]+\Z", description="the name of an interface")
_LINE = Meta(pattern=r"\A[^\n]*\Z", description="a list with one line per entry")
_WITH_DASH = Meta(pattern=r"\A-", description="--name=value")
_PYTHON = Meta(pattern=r"\A[A-Za-z0-9/][^\x00-\x20\x7f=]*\Z", description="the name or path of a program")
Word = Annotated[str, Meta(pattern=r"\A[^\s\x00-\x1f]+\Z", description="text without white space")]
Positive = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True, kw_only=True)
class Site:
    """A SLURM cluster. Every field is a key of a profile, except `name` and `file`."""

    name: str
    """Name of the file without its suffix."""
    file: Path
    description: str = ""
    """What `asyncpp templates list` says of it."""
    scheduler: Literal["slurm", "local"] = "slurm"
    """`slurm`; `local` only in the profile of that name."""
    partition: Word | None = None
    """Partition of the jobs; null: sbatch's default."""
    account: Word | None = None
    """Account that jobs are charged to; null: sbatch's default."""
    qos: Word | None = None
    """Quality of service of the jobs; null: sbatch's default."""
    constraint: Word | None = None
    """Features that nodes must have, in sbatch's notation."""
    exclude: Annotated[str, _NODES] | None = None
    """Nodes to exclude, in sbatch's notation: `n[3-4],n7`."""
    gpus_per_node: Count = 0
    """GPUs per node: a job requests one per rank. 0: runs train on CPUs."""
    gpu_type: Word | None = None
    """Type in `--gres=gpu:TYPE:N`."""
    cpus_per_node: Positive | None = None
    """CPUs per node, which limit its tasks."""
    tasks_per_node: Positive | None = None
    """Most tasks per node."""
    cpus_per_task: Positive | None = None
    """CPUs per rank; null: one per thread."""
    max_nodes: Positive | None = None
    """Most nodes per job."""
    memory: Annotated[str, _MEMORY] | None = None
    """Memory per node, in sbatch's notation: `64G`."""
    time: Annotated[str, _TIME] = "24:00:00"
    """Time limit of a job, in quotes: `"MINUTES"`, `"HH:MM:SS"` or `"D-HH:MM:SS"` (`"4:00"` is four minutes).
    A longer run resumes in the next job."""
    time_margin: Annotated[float, Meta(ge=1)] | None = None
    """Multiple of its slowest run's [expected time](plan.md#cost) that a job asks for, besides 15 minutes,
    where `run.gpu` names the GPUs; at most `time`. null: `time`."""
    signal_lead: int = 120
    """Seconds before the time limit at which a job saves and requeues itself; at least `site.grace` + 10.
    SLURM may be a minute early."""
    retries: Count = 2
    """How often a failed run is started again; also `launch --retries`. Preempted runs always are."""
    max_parallel: Positive | None = None
    """Most runs of a launch at a time, over its arrays; also `launch --max-parallel`."""
    array_limit: Positive | None = None
    """Most tasks per array. null: SLURM's `MaxArraySize`."""
    submit_limit: Positive | None = None
    """Most queued and running jobs of yours, counting array tasks. The rest waits for the next launch, or for
    `--wait`."""
    network_interface: Annotated[str, _INTERFACE] | None = None
    """Interface for traffic between nodes: `ib0`. null: chosen by gloo and NCCL."""
    setup: list[Annotated[str, _LINE]] = field(default_factory=list)
    """Shell lines at the beginning of each job: `module load ...`. A job in which one fails ends."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of each job."""
    flags: dict[str, Any] = field(default_factory=dict)
    """sbatch flags to add or replace: `{mem-per-gpu: 100G, licenses: "a:1"}`."""
    remove_flags: list[str] = field(default_factory=list)
    """sbatch flags that the site refuses: `[requeue]`."""
    srun_flags: list[Annotated[str, _WITH_DASH]] = field(default_factory=list)
    """Additional arguments of srun: `[--mpi=none]`."""
    command_prefix: str = ""
    """Words before the ranks' command: `apptainer exec --nv /shared/asyncpp.sif`
    ([containers](slurm.md#containers))."""
    python: Annotated[str, _PYTHON] | None = None
    """Python of the ranks, such as `python3` of an image. null: the one that launches."""
    on_end: list[str] = field(default_factory=list)
    """Command to run when all runs of a launch have ended: `[notify-send, asyncpp]`, by a last, short job
    (output: `end-*.out` in the submission's folder) or the command that waited. Its last word is a sentence
    ("mine: 6 of 6 runs completed in mine"); ASYNCPP_FOLDER, ASYNCPP_COMPLETED and ASYNCPP_RUNS are in its
    environment."""
    run: dict[str, Any] = field(default_factory=dict)
    """Keys of `site` in place of the runs' own: `{grace: 240, timeout: 600, threads: 4}`."""


_KEYS = {entry.name: entry for entry in dataclasses.fields(Site) if entry.name not in ("name", "file")}


def _holds_text(place: tuple[str, ...], value: object) -> bool:
    """Whether a place in a profile holds text; see `yaml_data.HoldsText`."""
    section, *inner = place
    if section == "time_margin":
        return False
    if section == "run":
        return holds_text(f"site.{'.'.join(inner)}")
    if section == "flags" and (value is True or sbatch_flags.is_number(".".join(inner))):
        return False  # a flag without a value, or with a number
    return section in _KEYS and re.match("int|Count|Positive", str(_KEYS[section].type)) is None


_INSTEAD = {
    "modules": "setup: [module load NAME]",
    "module": "setup: [module load NAME]",
    "gpus": "gpus_per_node: N",
    "nodes": "max_nodes: N; a run has as many as its ranks need",
    "container": "command_prefix: apptainer exec --nv IMAGE, and python: python3",
}
"""What is written in place of keys that people try."""


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
        f"--site: {not_found(name, sorted(files))}, the path of a YAML file, or a "
        f"profile of your own as {user_folder() / (path.stem + '.yaml')}"
    )


def site_option(site: Site) -> str:
    """What `--site` takes for a profile in any folder: its name, or its absolute path if it has none."""
    return site.name if site_files().get(site.name) == site.file else str(site.file.absolute())


def read_site(file: Path, *, name: str) -> Site:
    """The profile in a file.

    Raises:
        UserError: it is invalid; the message names file and key.
    """
    content = resolved_file(read_mapping(file, holds_text=_holds_text), where=str(file))
    _check_keys(file, content)
    try:
        site = converted(content | {"name": name, "file": file}, Site, where=str(file))
    except DamagedError as error:
        raise UserError(str(error)) from None
    _check(site)
    return site


def _check_keys(file: Path, content: dict[str, Any]) -> None:
    problems = []
    for key in content:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else f"accepted: {', '.join(_KEYS)}"
            if (instead := _INSTEAD.get(key)) is not None:
                hint = f"write {instead}"
            problems.append(f"{file}: {key}: unknown key; {hint}")
    refuse_all(problems)


def _check(site: Site) -> None:
    """Check what depends on other keys, or on the value of one.

    Raises:
        UserError: the profile is invalid.
    """

    def refuse(key: str, message: str) -> None:
        raise UserError(f"{site.file}: {key}: {message}")

    for name in site.environment:
        if not _VARIABLE.fullmatch(name):
            refuse("environment", f"{name!r} is not a name of an environment variable")
    if site.setup and (last := setup_commands(site.setup)[-1]) and not _is_whole(last):
        refuse("setup", f"{last.splitlines()[0]!r} begins no whole command of bash; accepted: lines of bash")
    for key, names in (("flags", list(site.flags)), ("remove_flags", site.remove_flags)):
        for name in names:
            if not _FLAG.fullmatch(name):
                refuse(key, f"{name}: accepted: a flag's name without its dashes")
            if name in sbatch_flags.SET_BY_ASYNCPP:
                refuse(key, f"{name} is set by asyncpp and cannot be changed")
    for name, value in site.flags.items():
        if name in sbatch_flags.KEYS:
            refuse("flags", f"{name} has a key of its own; write {sbatch_flags.KEYS[name]} for it")
        try:
            site.flags[name] = sbatch_flags.flag_value(name, value)
        except ValueError as error:
            refuse("flags", f"{name} is {value!r}; accepted: {error}")
    for flag in site.srun_flags:
        if re.match(r"(-m|--dist[a-z]*=)(?!block|\*)", flag):
            refuse(
                "srun_flags", f"{flag}: accepted: block; a rank's GPU and neighbours follow from its number"
            )
    if site.on_end and not site.on_end[0]:
        refuse("on_end", "the first word is empty; accepted: a command and its arguments")
    try:
        shlex.split(site.command_prefix)
    except ValueError as error:
        refuse("command_prefix", f"{site.command_prefix!r} ({error}); accepted: words, quoted as for a shell")
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
    limit = seconds_of(site.time)
    if site.scheduler == "slurm" and site.signal_lead >= limit:
        note = time_note(site.time) or f'"{site.time}" is {limit / 60:g} minutes'
        refuse(
            "signal_lead",
            f"{site.signal_lead} s before its time limit a job is told to end, which is before it starts "
            f"({note}); accepted: a longer time, or less than {limit:g}",
        )


def seconds_of(time: str) -> float:
    """SLURM's time notation (`MINUTES`, `MINUTES:SS`, `HH:MM:SS`, `D-HH:MM:SS`) in seconds; 0 is no limit."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", time):
        return math.inf
    days, _, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or math.inf


def time_note(time: str) -> str:
    """What a limit of the form `4:00` means, which people take for hours; empty for other forms."""
    if not re.fullmatch(r"\d+:\d+", time):
        return ""
    return f'"{time}" is {seconds_of(time) / 60:g} minutes, as for sbatch; hours: "{time}:00"'


def setup_commands(lines: Sequence[str]) -> list[str]:
    """The whole commands in lines of bash: `if ...; then`, `module load a` and `fi` are one."""
    commands: list[str] = []
    open_lines: list[str] = []
    for line in lines:
        open_lines.append(line)
        if _is_whole("\n".join(open_lines)):
            commands.append("\n".join(open_lines))
            open_lines = []
    return [*commands, *(["\n".join(open_lines)] if open_lines else [])]


def _is_whole(command: str) -> bool:
    """Whether bash takes a text as whole commands; where there is no bash, it is."""
    if re.search(r"(?<!\\)(\\\\)*\\\Z", command):
        return False
    try:
        # It warns of a here-document without an end.
        read = subprocess.run(["bash", "-n"], input=command, capture_output=True, text=True, check=False)
    except OSError:
        return True
    return read.returncode == 0 and not read.stderr
