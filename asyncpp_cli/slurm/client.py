"""SLURM's command-line tools, run without a shell and with a timeout."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.runs.status import CLOCK_MARGIN

_USUAL_MAX_ARRAY_SIZE = 1001
_TIMEOUT = 60.0
_NO_MESSAGE = "it failed without a message"
_HAS_ENDED = re.compile(f"already complet|Invalid job id|not running|{_NO_MESSAGE}", re.IGNORECASE)
"""SLURM's errors when a job to cancel has already ended; a signal to such a job fails without a message."""
_UNKNOWN = re.compile("Invalid job id", re.IGNORECASE)
"""SLURM's error for a job that it no longer knows."""

_LONGEST_ARGUMENT = 60_000
"""Characters of names or ids in one command; Linux takes 128 KiB in one argument."""

_CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Variables that say where the cluster is and who asks."""

_OPTION_VARIABLES = re.compile(
    "(SACCT|SACCTMGR|SALLOC|SBATCH|SCANCEL|SCONTROL|SINFO|SLURM|SLURMD|SQUEUE|SRUN|SUBMITIT)_"
)
"""Variables that set options of SLURM's commands, or describe the job around this process."""

_SRUN_NAMES = (
    "ACCOUNT ACCTG_FREQ BCAST BCAST_EXCLUDE BURST_BUFFER CLUSTERS COMPRESS CONSTRAINT CONTAINER CORE_SPEC "
    "CPU_BIND CPU_BIND_LIST CPU_BIND_TYPE CPU_BIND_VERBOSE DEBUG DEBUG_FLAGS DELAY_BOOT DEPENDENCY "
    "DISABLE_STATUS DISTRIBUTION DIST_PLANESIZE EPILOG EXACT EXCLUSIVE EXIT_ERROR EXIT_IMMEDIATE "
    "EXPORT_ENV GRES GRES_FLAGS IMMEDIATE KILL_BAD_EXIT LABELIO MEM_BIND MEM_BIND_LIST "
    "MEM_BIND_PREFER MEM_BIND_SORT MEM_BIND_TYPE MEM_BIND_VERBOSE MPI_TYPE NETWORK NO_KILL OPEN_MODE "
    "OVERLAP PARTITION PMI_KVS_NO_DUP_KEYS POWER PROLOG QOS REMOTE_CWD REQ_SWITCH RESERVATION RESV_PORTS "
    "SEND_LIBS SIGNAL SPREAD_JOB SRUN_REDUCE_TASK_EXIT_MSG STDERRMODE STDINMODE STDOUTMODE STEP_GRES "
    "STEP_KILLED_MSG_NODE_ID TASK_EPILOG TASK_PROLOG TEST_EXEC THREADS THREAD_SPEC TIMELIMIT TREE_WIDTH "
    "TRES_BIND UNBUFFEREDIO USE_MIN_NODES WAIT WAIT4SWITCH WCKEY WORKING_DIR"
)
SRUN_OPTIONS = (
    *(f"SLURM_{name}" for name in _SRUN_NAMES.split()),
    *("SLURMD_DEBUG", "SRUN_CONTAINER", "SRUN_CPUS_PER_TASK", "SRUN_EXPORT_ENV"),
    *("PMI_FANOUT", "PMI_FANOUT_OFF_HOST", "PMI_TIME"),
)
"""Variables that set options of srun: those of its manual page ("input environment variables", up to version
24.05) that do not describe the job. SLURM hands a site's `flags` on by `SLURM_HINT`, `SLURM_CPU_FREQ_REQ`,
`SLURM_GPU_BIND` and `SLURM_GPU_FREQ`; bindings to CPUs and memory are those of the job's script."""


class SlurmError(UserError):
    """A SLURM command failed or is missing; the message is SLURM's."""


class NoSlurmError(SlurmError):
    """SLURM's commands are not on this machine."""


@dataclass(frozen=True)
class Cluster:
    """A SLURM cluster."""

    name: str
    version: str
    max_array_size: int
    """Exclusive upper bound of array indices."""


@dataclass(frozen=True)
class QueuedJob:
    """A job in SLURM's queue: pending, running or ending."""

    id: str
    """`12_3`; the number alone for a job that is not in an array."""
    raw_id: str
    state: str
    nodes: str
    reason: str
    """Why it is pending."""


@dataclass(frozen=True)
class AccountedJob:
    """Accounting record of a job's last start."""

    id: str
    state: str
    exit_code: str
    seconds: int
    nodes: str


def run_command(command: Sequence[str], *, timeout: float | None = _TIMEOUT) -> str:
    """Output of a SLURM command other than srun, which asks or changes the cluster of slurm.conf.

    Args:
        command: the command, as words.
        timeout: seconds to wait for an answer; None: as long as the command does.

    Raises:
        SlurmError: it failed, could not be run, or did not answer in time.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
            env=_environment(),
        )
    except FileNotFoundError:
        raise NoSlurmError(f"there is no SLURM here: {command[0]} is not found") from None
    except OSError as error:
        raise SlurmError(f"{command[0]} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not answer within {timeout:g} s") from None
    if done.returncode != 0:
        raise SlurmError(f"{command[0]}: {error_text(done.stderr or done.stdout)}")
    return done.stdout


def rows(command: Sequence[str], *, fields: int) -> list[list[str]]:
    """The lines that a SLURM command prints, each as so many fields, which `|` separates.

    Raises:
        SlurmError: see `run_command`; or it printed something else.
    """
    found = [line.strip().split("|", fields - 1) for line in run_command(command).splitlines()]
    for values in found:
        if len(values) != fields:
            raise SlurmError(f"{command[0]}: cannot read {'|'.join(values)!r}")
    return found


def error_text(text: str) -> str:
    """SLURM's message in one line, without repetitions and command names."""
    lines = [re.sub(r"^[a-z]+: (error: )?", "", line.strip()) for line in text.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line)) or _NO_MESSAGE


def configuration() -> dict[str, str]:
    """SLURM's settings (slurm.conf), by name.

    Raises:
        SlurmError: SLURM does not answer.
    """
    said = run_command(["scontrol", "show", "config"])
    return dict(re.findall(r"^(\w+)\s+= (.*?)\s*$", said, re.MULTILINE))


def max_array_size(settings: Mapping[str, str]) -> int:
    """SLURM's limit on the tasks of an array, from its settings."""
    return int(settings.get("MaxArraySize", _USUAL_MAX_ARRAY_SIZE))


@functools.cache
def cluster() -> Cluster:
    """The cluster that SLURM's commands use.

    Raises:
        SlurmError: SLURM does not answer.
    """
    settings = configuration()
    return Cluster(
        name=settings.get("ClusterName", ""),
        version=settings.get("SLURM_VERSION", ""),
        max_array_size=max_array_size(settings),
    )


def queued_jobs(names: Collection[str]) -> dict[tuple[str, int], QueuedJob]:
    """Queued jobs with these names, by name and array index.

    Raises:
        SlurmError: SLURM does not answer.
    """
    form = "%F|%K|%A|%T|%N|%j|%r"
    jobs: dict[tuple[str, int], QueuedJob] = {}
    for array, index, raw_id, state, nodes, name, reason in _rows_of_jobs(
        ["squeue", "--all", "-h", "-r", "-o", form], names, fields=7
    ):
        if state == "REVOKED":
            continue  # another cluster of the federation started the job
        number, job_id = (int(index), f"{array}_{index}") if index.isdigit() else (0, raw_id)
        why_pending = "" if reason == "None" else reason
        jobs[name, number] = QueuedJob(job_id, raw_id, state, nodes, why_pending)
    return jobs


def _rows_of_jobs(command: Sequence[str], names: Collection[str], *, fields: int) -> Iterator[list[str]]:
    """What a command prints of the jobs with these names, as fields by line; many are asked for in portions.

    Raises:
        SlurmError: it fails, or prints something else.
    """
    for portion in _portions(sorted(names)):
        yield from rows([*command, f"--name={','.join(portion)}"], fields=fields)


def _portions(words: Sequence[str]) -> Iterator[list[str]]:
    """The words in portions that each fit into one argument of a command."""
    portion: list[str] = []
    for word in words:
        if sum(map(len, portion)) + len(portion) + len(word) > _LONGEST_ARGUMENT:
            yield portion
            portion = []
        portion.append(word)
    if portion:
        yield portion


def user_job_count() -> int:
    """Number of this user's queued and running jobs, counting array tasks."""
    return len(run_command(["squeue", "--all", "-h", "-r", "-o", "%A", f"--user={os.getuid()}"]).split())


def accounted_jobs(names: Collection[str], *, since: float) -> dict[tuple[str, int], AccountedJob]:
    """Accounting records of jobs with these names, by name and array index; empty without accounting.

    Args:
        names: job names.
        since: submission time of the first of them, in seconds since 1970, by any clock of the cluster.
    """
    from datetime import datetime

    start = datetime.fromtimestamp(since - CLOCK_MARGIN).strftime("%Y-%m-%dT%H:%M:%S")
    fields = "JobID,State,ExitCode,ElapsedRaw,NodeList,JobName"
    command = ["sacct", "--allusers", "-n", "-P", "-X", f"--starttime={start}", f"--format={fields}"]
    try:
        records = list(_rows_of_jobs(command, names, fields=6))
    except SlurmError:
        return {}
    found: dict[tuple[str, int], AccountedJob] = {}
    for job_id, state, code, seconds, nodes, name in records:
        array, _, index = job_id.partition("_")
        # SLURM forgets the index of an array's only task that was cancelled soon.
        for number in _indices(index or "0"):
            known = AccountedJob(
                id=f"{array}_{number}",
                state=state.partition(" ")[0],  # "CANCELLED by 0" is CANCELLED
                exit_code=code,
                seconds=int(seconds or 0),
                nodes="" if nodes == "None assigned" else nodes,
            )
            # A task that started has a record of its own; that of the tasks that did not may name it, too.
            if index.isdigit():
                found[name, number] = known
            else:
                found.setdefault((name, number), known)
    return found


def _indices(text: str) -> list[int]:
    """Array indices in sacct's notation: `3`, or `[0,2-4,6-10:2%2]` for tasks that never started."""
    indices: list[int] = []
    for part in text.strip("[]").partition("%")[0].split(","):
        if match := re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part):
            first, last, step = match.groups()
            indices += range(int(first), int(last or first) + 1, int(step or 1))
    return indices


def cancel(ids: Collection[str], *, signal: str | None = None) -> None:
    """Cancel jobs, or send their tasks a signal. Jobs that have ended meanwhile are ignored.

    Raises:
        SlurmError: SLURM refuses.
    """
    for portion in _portions(sorted(ids)):
        try:
            run_command(["scancel", *([f"--signal={signal}"] if signal else []), *grouped(portion)])
        except SlurmError as error:
            if not all(_HAS_ENDED.search(sentence) for sentence in str(error).split("; ")):
                raise


def grouped(ids: Collection[str]) -> list[str]:
    """Ids of jobs, those of an array as one (`12_[0,3-5]`, `12_7`): SLURM takes a request for each id."""
    arrays: dict[str, list[int]] = {}
    for job_id in ids:
        array, _, index = job_id.partition("_")
        arrays.setdefault(array, []).extend([int(index)] if index else [])
    return [
        f"{array}_[{_ranges(indices)}]" if len(indices) > 1 else "_".join([array, *map(str, indices)])
        for array, indices in sorted(arrays.items())
    ]


def _ranges(indices: Collection[int]) -> str:
    """Array indices in SLURM's notation: `0,3-5`."""
    ranges: list[list[int]] = []
    for index in sorted(indices):
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _environment() -> dict[str, str]:
    """The environment of SLURM's commands: no user's variable of theirs changes what they do or answer."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _CLUSTER_VARIABLES or not _OPTION_VARIABLES.match(name)
    }
    # Or sacct would cut a list of array indices at 64 characters.
    return kept | {"SLURM_BITSTR_LEN": "0"}


def step_environment() -> dict[str, str]:
    """The environment of srun in a job: what SLURM says of the job, without options of srun."""
    return {name: value for name, value in os.environ.items() if name not in SRUN_OPTIONS}


def job_state(job_id: str) -> str:
    """SLURM's state of a job; `gone` if SLURM no longer knows it.

    Args:
        job_id: `12_3` for an array task, not its raw id: see `_state_and_end`.

    Raises:
        SlurmError: SLURM does not answer.
    """
    state, _ = _state_and_end(job_id)
    return state or "gone"


def restarts(job_id: str) -> int:
    """How often SLURM has started a job again.

    Raises:
        SlurmError: SLURM does not say.
    """
    description = run_command(["scontrol", "--all", "--oneliner", "show", "job", job_id])
    if (match := re.search(r"\bRestarts=(\d+)", description)) is None:
        raise SlurmError(f"scontrol: no Restarts of {job_id}")
    return int(match[1])


def job_end_time(job_id: str) -> float | None:
    """When a job will reach its time limit, in seconds since 1970; None if unlimited or unknown.

    Unknown also of a job that is being ended: SLURM then gives the time at which that began.
    """
    from datetime import datetime

    try:
        state, end = _state_and_end(job_id)
        return None if phase_of(state) is JobPhase.ENDING else datetime.fromisoformat(end).timestamp()
    except (SlurmError, ValueError):
        return None


def requeue(job_id: str) -> None:
    """Requeue a running job: SLURM ends it and starts it again later.

    SLURM signals every process of the job at once, including this command, which must wait for the answer: a
    caller in the job blocks the signals.

    Args:
        job_id: `12_3` for an array task. With the raw id, which may equal the array's, SLURM would requeue
            every task, including those that have just completed.

    Raises:
        SlurmError: SLURM refuses, or does not answer.
    """
    run_command(["scontrol", "requeue", job_id])


def broken_nodes(nodes: str) -> str:
    """Which nodes are down, failing or not responding, with their states; empty for none, or if SLURM does
    not answer.

    Args:
        nodes: list in SLURM's notation: `n[1-2]`.
    """
    if not nodes:
        return ""
    try:
        states = sorted(rows(["sinfo", "--all", "-h", "-N", f"--nodes={nodes}", "-o", "%N|%T"], fields=2))
    except SlurmError:
        return ""
    broken = {name: state for name, state in states if state.startswith(("down", "fail")) or "*" in state}
    return ", ".join(f"node {node} is {state}" for node, state in broken.items())


def _state_and_end(job_id: str) -> tuple[str, str]:
    """State and end time of a job; empty if SLURM does not know it.

    One task of every array has a raw id equal to the array's, for which squeue lists the whole array. So
    tasks are queried by `ARRAY_INDEX`, and only the task's own line is read.
    """
    try:
        known = rows(["squeue", "--all", "-h", "-r", "-j", job_id, "-o", "%A|%F_%K|%T|%e"], fields=4)
    except SlurmError as error:
        if _UNKNOWN.search(str(error)):
            return "", ""
        raise
    for raw_id, task_id, state, end in known:
        if job_id in (task_id, raw_id):
            return state, end
    return "", ""


class JobPhase(StrEnum):
    """Phase of a job between submission and end.

    `squeue` prints one state. A job has a base state (PENDING, RUNNING, ...) and flags, and a flag hides the
    base state: a running job is SIGNALING from the time a signal is sent until every node has
    acknowledged it. The states are those of SLURM's `job_state_string` (src/common/slurm_protocol_defs.c,
    read up to version 26.11) and of the man page squeue(1), JOB STATE CODES.
    """

    PENDING = "pending"
    """It has no nodes yet; SLURM starts it, possibly again or after being released."""
    RUNNING = "running"
    """It has nodes and is not being ended."""
    ENDING = "ending"
    """It is being ended; processes of it may still run."""
    ENDED = "ended"
    """No process of it runs, and it is not restarted."""


# SPECIAL_EXIT: requeued and held, by `scontrol requeuehold State=SpecialExit`. RESV_DEL_HOLD: held, as its
# reservation was deleted. EXPEDITING: requeued with priority. CONFIGURING: its nodes may still be booting.
# SIGNALING: not every node has acknowledged a signal. STOPPED: by SIGSTOP; it keeps its CPUs. SUSPENDED: its
# CPUs are lent to others for a while. UPDATE_DB: its accounting record is updated. STAGE_OUT: files are
# copied from a burst buffer. REVOKED: started by another cluster of the federation.
_STATES = {
    JobPhase.PENDING: "PENDING REQUEUED REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD EXPEDITING",
    JobPhase.RUNNING: "RUNNING CONFIGURING POWER_UP_NODE RESIZING SIGNALING STOPPED SUSPENDED UPDATE_DB",
    JobPhase.ENDING: "COMPLETING STAGE_OUT",
    JobPhase.ENDED: "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY "
    "PREEMPTED RECONFIG_FAIL REVOKED TIMEOUT",
}
_PHASES = {state: phase for phase, states in _STATES.items() for state in states.split()}

KNOWN = frozenset(_PHASES)
"""The known states."""


def phase_of(state: str) -> JobPhase:
    """The phase of a queued job, by SLURM's state.

    Unknown states, of later versions of SLURM, count as running: requeueing then fails at worst.
    """
    return _PHASES.get(state, JobPhase.RUNNING)
