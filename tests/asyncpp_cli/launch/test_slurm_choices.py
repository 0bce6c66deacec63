"""How many runs of each array may go on at once, where SLURM bounds each array alone: here it is played."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as replace_fields
from support.attempts import claimed, submitted
from support.command_line import asyncpp, refusal, succeeded
from support.files import edit, write_program
from support.report_experiment import ExperimentFolder, settings

from asyncpp_cli.doctor import job
from asyncpp_cli.doctor.checks import submission_check
from asyncpp_cli.launch import cluster
from asyncpp_cli.launch.common.arrays import (
    ArrayManifest,
    JobShape,
    Throttle,
    site_settings_of,
    throttles,
)
from asyncpp_cli.launch.common.early_signals import signals_blocked
from asyncpp_cli.launch.job import array_task
from asyncpp_cli.launch.submission import sbatch
from asyncpp_cli.launch.submission.sbatch import BatchJob, profile_keys
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import Claimed, Job, Refused
from asyncpp_cli.runs.experiment_folder import Experiment, open_experiment
from asyncpp_cli.runs.processes import this_process
from asyncpp_cli.runs.status import Cause, State, Status
from asyncpp_cli.sites.profile import find_site
from asyncpp_cli.slurm import client as slurm
from asyncpp_cli.slurm.client import JobPhase, phase_of
from asyncpp_cli.slurm.run_status import SlurmQueue
from asyncpp_cli.slurm.submissions import new_folder, read_submissions
from stages.liveness.stop_signal import RESUMABLE


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.integers(1, 400))
def test_max_parallel_holds_over_all_arrays(sizes: list[int], at_once: int) -> None:
    found = throttles(sizes, at_once=at_once)
    assert all(1 <= turn.at_once <= size for turn, size in zip(found, sizes, strict=True))
    assert all(turn.after is None or turn.after < index for index, turn in enumerate(found))
    together = [turn.at_once for turn in found if turn.after is None]
    if len(together) == len(found):
        assert sum(together) == min(at_once, sum(sizes))
    else:
        # One after another.
        assert [turn.after for turn in found] == [None, *range(len(found) - 1)]
        assert [turn.at_once for turn in found] == [min(at_once, size) for size in sizes]


def test_arrays_take_about_as_many_rounds() -> None:
    assert throttles([50, 50, 100], at_once=4) == [Throttle(1), Throttle(1), Throttle(2)]
    assert throttles([1, 50], at_once=7) == [Throttle(1), Throttle(6)]
    assert throttles([3, 5], at_once=None) == throttles([3, 5], at_once=100) == [Throttle(3), Throttle(5)]
    assert throttles([40, 1, 10], at_once=2) == [Throttle(2), Throttle(1, 0), Throttle(2, 1)]


WORDS = {
    JobPhase.PENDING: "PENDING REQUEUED REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD EXPEDITING",
    JobPhase.RUNNING: "RUNNING SIGNALING TELEPORTING",  # also a word of a later SLURM
    JobPhase.ENDING: "COMPLETING STAGE_OUT",
    JobPhase.ENDED: "COMPLETED CANCELLED FAILED TIMEOUT NODE_FAIL PREEMPTED BOOT_FAIL DEADLINE OUT_OF_MEMORY "
    "REVOKED LAUNCH_FAILED RECONFIG_FAIL",
}


@pytest.mark.parametrize(("phase", "words"), WORDS.items())
def test_words_of_squeue_have_a_phase(phase: JobPhase, words: str) -> None:
    assert [word for word in words.split() if phase_of(word) is not phase] == []


POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


@pytest.mark.parametrize(
    ("message", "keys"),
    [
        (f"AssocMaxSubmitJobLimit; {POLICY}", "submit_limit"),
        (f"QOSMaxSubmitJobPerUserLimit; {POLICY}", "submit_limit"),
        (f"AssocMaxWallDurationPerJobLimit; {POLICY}", "time, qos"),
        (POLICY, "submit_limit, qos, account, time"),
        ("Invalid account or account/partition combination specified", "account, partition, qos"),
        ("invalid partition specified: nowhere", "partition"),
        ("Invalid qos specification", "qos"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "time"),
    ],
)
def test_the_keys_that_may_be_the_cause(message: str, keys: str) -> None:
    assert profile_keys(f"sbatch: {message}") == keys


JOB = Job(cluster="c", name="a", index=0, id="7_0", restart=0, nodes="n1", submission="s")
TABLE = ArrayManifest(
    name="a", submission="s", cluster="c", replay=True, retries=1, signal_lead=45,
    network_interface=None, srun_flags=[], site_settings={}, code="", software={},
    shape=JobShape(nodes=1, tasks=1, tasks_per_node=1, cpus_per_task=1, gpus_per_node=0), rows=[],
)  # fmt: skip
STOPPED = Status(state=State.INTERRUPTED, cause=Cause.STOPPED, attempt=1)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of commands of the cluster `c`. No longer than a look is the end waited for."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(array_task, "_SECONDS_TO_BE_ENDED", 0.0)
    slurm.cluster.cache_clear()
    write_program(tmp_path / "scontrol", 'echo "ClusterName = c"')
    yield tmp_path
    slurm.cluster.cache_clear()


def made(folder: Path, *states: State) -> Experiment:
    """An experiment with runs in these states."""
    experiment = ExperimentFolder(folder / "experiment")
    for seed, state in enumerate(states):
        status = None if state == State.COMPLETED else Status(state=state)
        experiment.add(settings("1f1b", "muon", seed=seed), status=status)
    return open_experiment(experiment.folder)


def test_the_command_outlives_the_signal_that_it_brings_about(commands: Path) -> None:
    write_program(commands / "scontrol", "kill -TERM $$", 'echo heard > "$0.answer"')
    with signals_blocked():
        slurm.requeue("7_0")
    assert (commands / "scontrol.answer").exists()


@pytest.mark.parametrize(
    ("state", "said"),
    [("PENDING", "queued again"), ("COMPLETING", "queued again"), ("RUNNING", "not queued again (scontrol:")],
)
def test_a_job_whose_requeueing_was_not_acknowledged(
    commands: Path, capfd: pytest.CaptureFixture[str], state: str, said: str
) -> None:
    asked = commands / "asked"
    write_program(commands / "scontrol", f"touch {asked}", "echo Socket timed out >&2", "exit 1")
    write_program(commands / "squeue", f"test -e {asked} && s={state} || s=RUNNING", 'echo "7|7_0|$s|N/A"')
    assert array_task._requeue(STOPPED, JOB) == RESUMABLE
    printed = capfd.readouterr().out.strip().splitlines()[-1]
    assert printed.partition(" ")[2].partition(" ")[2].startswith(said)


def test_a_completed_run_whose_job_is_still_ending_is_counted_once(commands: Path) -> None:
    experiment = made(commands, State.COMPLETED, State.PENDING)
    done, waiting = experiment.runs
    submitted(experiment, a=(done.id, waiting.id))
    lines = ["7|0|7|COMPLETING|n1|a|None", "7|1|8|PENDING||a|Priority"]
    write_program(commands / "squeue", *(f"echo '{line}'" for line in lines))
    (commands / "site.yaml").write_text("time: '60'\nnetwork_interface: lo\n")
    ended = succeeded("launch", experiment.folder, "--replay", "--site", commands / "site.yaml")
    assert "Nothing to submit: 1 of 2 runs completed, 1 queued or running\n" in ended.errors
    waiting.write_status(replace(waiting.status(), state=State.PAUSED, step=2))
    write_program(commands / "squeue", "true")
    site = commands / "site.yaml"
    ended = succeeded("launch", experiment.folder, "--replay", "--site", site, "--until", "2")
    assert "Nothing to submit: 2 of 2 runs completed or paused, 0 queued or running\n" in ended.errors


@pytest.mark.parametrize("node", [-3600.0, 0.0, 3600.0])
def test_a_job_that_began_after_the_queue_was_read_goes_on_whatever_its_nodes_clock(
    commands: Path, node: float
) -> None:
    experiment = made(commands, State.COMPLETED)
    (run,) = experiment.runs
    write_program(commands / "squeue", 'echo "7|0|7|PENDING||None|a"')
    submission = submitted(experiment, a=(run.id,))
    queue = SlurmQueue(experiment)
    assert queue.queued is not None
    run.write_status(Status(state=State.PENDING))
    attempt = claimed(run, processes=1, replay=True, steps=5, job=replace(JOB, submission=submission))
    elsewhere = replace(this_process(), host="elsewhere", boot="another")
    attempt.record_start(0, elsewhere)
    edit(attempt.file(Claimed), by=asdict(elsewhere), claimed=time.time() + node)
    assert queue.run_status(run, with_accounting=False).status.state == State.RUNNING


@pytest.mark.parametrize("whose", ["*", "*--user=*"], ids=["own", "another experiment's"])
def test_a_failed_run_is_submitted_as_soon_as_slurm_has_let_go_of_the_last_job(
    commands: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """With `submit_limit: 1` a job leaves no room when the command begins: one of this experiment that is
    still ending, or one of another experiment, of which SLURM tells only whoever asks for all of the user."""
    monkeypatch.setattr(cluster, "_POLL_SECONDS", 0.01)
    site = commands / "site.yaml"
    site.write_text("time: '60'\nnetwork_interface: lo\nsubmit_limit: 1\n")
    experiment = made(commands, State.COMPLETED, State.FAILED, State.PENDING)
    good, failing, _ = experiment.runs
    submitted(experiment, a=(good.id, failing.id))
    # At its tenth answer SLURM has let go of the job.
    ending, asked = "7|0|7|COMPLETING|n1|a|None", commands / "asked"
    tells = f"test $(wc -l < {asked}) -ge 10 || echo '{ending}'"
    write_program(commands / "squeue", f"echo >> {asked}", f'case "$*" in {whose}) {tells};; esac')
    trains = f"cp {good.status_file} {failing.status_file}"
    write_program(commands / "sbatch", trains, "echo Submitted batch job 8")
    ended = asyncpp("launch", experiment.folder, "--failed", "--replay", "--site", site, "--wait")
    assert "1 exceed" in ended.errors
    assert "2 of 3 runs completed" in ended.errors
    # And not the run that was not chosen.
    (submission,) = (each for each in read_submissions(experiment).all if each.site != "s")
    assert [array.runs for array in submission.arrays] == [(failing.id,)]


def test_runs_that_always_fail_keep_no_other_from_its_turn(commands: Path) -> None:
    site = commands / "site.yaml"
    site.write_text("time: '60'\nnetwork_interface: lo\nsubmit_limit: 2\n")
    write_program(commands / "squeue")
    write_program(commands / "sbatch", "echo Submitted batch job 8")
    folder = ExperimentFolder(commands / "experiment")
    # Jobs of two ranks sort before those of four.
    for stages, state in ((2, State.FAILED), (2, State.INTERRUPTED), (2, State.FAILED), (4, State.PENDING)):
        seed = len(list(folder.folder.glob("runs/*")))
        of_run = settings("1f1b", "muon", seed=seed, **{"parallel.stages": stages})
        folder.add(of_run, status=Status(state=state))
    experiment = open_experiment(folder.folder)
    _, interrupted, _, never_tried = experiment.runs
    succeeded("launch", experiment.folder, "--site", site)
    [submission] = read_submissions(experiment).all
    assert [array.runs for array in submission.arrays] == [(interrupted.id,), (never_tried.id,)]


def test_ctrl_c_at_one_site_starts_nothing_at_the_next(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("XDG_CONFIG_HOME", str(commands))
    sites = commands / "asyncpp" / "sites"
    sites.mkdir(parents=True)
    for name in ("s", "t"):
        (sites / f"{name}.yaml").write_text("time: '60'\nnetwork_interface: lo\n")
    experiment = made(commands, State.FAILED, State.FAILED)
    for site, run in zip(("s", "t"), experiment.runs, strict=True):
        name = submitted(experiment, a=(run.id,))
        edit(experiment.submissions / name / "submission.json", site=site)
    write_program(commands / "squeue")
    write_program(commands / "sbatch", "echo Submitted batch job 8")
    # This module's alone: a command that takes long to end is waited for by `time.sleep`, too.
    monkeypatch.setattr(cluster, "time", SimpleNamespace(sleep=interrupt))
    ended = asyncpp("launch", experiment.folder, "--failed", "--replay", "--wait")
    assert (ended.code, ended.errors.count("Submitted 1 of 2 runs")) == (130, 1), ended


def test_later_submissions_sort_behind_earlier_ones(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [new_folder(experiment).name]
    monkeypatch.setenv("TZ", "UTC+9")  # nine hours back; the others follow within a second
    time.tzset()
    made += [new_folder(experiment).name for _ in range(4)]
    monkeypatch.undo()
    time.tzset()
    assert made == sorted(made)


OF_SRUN = (
    "ACCOUNT ACCTG_FREQ BCAST BCAST_EXCLUDE BURST_BUFFER CLUSTERS COMPRESS CONSTRAINT CORE_SPEC CPU_BIND "
    "DEBUG DEBUG_FLAGS DELAY_BOOT DEPENDENCY DISABLE_STATUS DISTRIBUTION DIST_PLANESIZE EPILOG EXACT "
    "EXCLUSIVE EXIT_ERROR EXIT_IMMEDIATE EXPORT_ENV GRES GRES_FLAGS IMMEDIATE KILL_BAD_EXIT LABELIO "
    "MEM_BIND MPI_TYPE NETWORK NO_KILL OPEN_MODE OVERLAP PARTITION PMI_KVS_NO_DUP_KEYS POWER PROLOG QOS "
    "REMOTE_CWD REQ_SWITCH RESERVATION RESV_PORTS SEND_LIBS SIGNAL SPREAD_JOB SRUN_REDUCE_TASK_EXIT_MSG "
    "STDERRMODE STDINMODE STDOUTMODE STEP_GRES TASK_EPILOG TASK_PROLOG TEST_EXEC THREADS THREAD_SPEC "
    "TIMELIMIT UNBUFFEREDIO USE_MIN_NODES WAIT WAIT4SWITCH WCKEY WORKING_DIR"
)
READ_BY_SRUN = {f"SLURM_{name}" for name in OF_SRUN.split()}
READ_BY_SRUN |= {"SLURMD_DEBUG", "SRUN_CONTAINER", "SRUN_CPUS_PER_TASK", "SRUN_EXPORT_ENV"}
"""Variables with which users set options of srun."""
HABITS = READ_BY_SRUN | {"SLURM_BITSTR_LEN", "SLURM_TIME_FORMAT", "SACCT_LOCAL", "SCANCEL_STATE"}
HABITS |= {"SCONTROL_ALL", "SINFO_FORMAT", "SQUEUE_STATES", "SBATCH_ARRAY_INX"}
"""These and one of each other command."""


def test_no_habit_of_the_user_reaches_a_command_of_slurm(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("squeue", "sacct", "sacctmgr", "scancel", "scontrol", "sinfo", "sbatch", "srun"):
        write_program(commands / name, f'env > "{commands}/{name}.env"', "echo Submitted batch job 7")
    (run,) = made(commands, State.PENDING).runs
    given = {"SLURM_CONF": "/etc/x", "SLURM_JWT": "secret", "HOME": str(commands), "SQUEUE_LATER": "1"}
    of_job = {"SLURM_JOB_ID": "7", "SLURM_GPUS": "1", "SLURM_HINT": "nomultithread"}
    for name, value in (dict.fromkeys(HABITS, "4") | given | of_job).items():
        monkeypatch.setenv(name, value)
    slurm.accounted_jobs(["a"], since=0)
    slurm.cancel(["7"])
    submission_check(find_site("testcluster"))  # sbatch
    slurm.configuration()  # scontrol
    assert slurm.broken_nodes("n1") == ""
    with pytest.raises(slurm.SlurmError, match="squeue: cannot read"):
        slurm.queued_jobs(["a"])
    site = find_site("testcluster")
    array = BatchJob(name="a", shape=TABLE.shape, tasks=1, command="", code="")
    assert sbatch.submit(site, commands, array) == "7"
    array_task._run_ranks(claimed(run, processes=1, replay=True, steps=1), TABLE, JOB)
    environments = {
        file.stem: dict(line.split("=", 1) for line in file.read_text().splitlines())
        for file in commands.glob("*.env")
    }
    assert len(environments) == 7
    of_srun = environments.pop("srun")
    assert of_srun.keys() >= (given.keys() | of_job.keys()) - {"SQUEUE_LATER"}
    assert of_srun.keys() & READ_BY_SRUN == set()
    for name, environment in environments.items():
        assert environment.items() >= {"SLURM_CONF": "/etc/x", "SLURM_JWT": "secret"}.items(), name
        assert environment.keys() & (HABITS | of_job.keys()) == {"SLURM_BITSTR_LEN"}, name
        assert (environment["SLURM_BITSTR_LEN"], "SQUEUE_LATER" in environment) == ("0", False)
    words = job._command(site, commands)
    assert {f"--unset={name}" for name in READ_BY_SRUN} <= set(words[: words.index("srun")])


@pytest.mark.slow
def test_names_and_ids_of_thousands_of_arrays_fit_into_the_arguments_of_commands(commands: Path) -> None:
    names = [f"asyncpp-a-sweep-of-many-shapes-20260101-000000-{number:06x}-1" for number in range(5000)]
    by_name = 'for word; do case "$word" in --name=*) echo "${word#--name=}";; esac; done | tr , "\\n"'
    write_program(commands / "squeue", f"{by_name} | sed 's/.*/7|3|9|RUNNING|n1|&|None/'")
    write_program(commands / "sacct", f"{by_name} | sed 's/.*/7_3|COMPLETED|0:0|60|n1|&/'")
    write_program(commands / "scancel", f'printf "%s\\n" "$@" >> {commands}/ids')
    assert slurm.queued_jobs(names).keys() == {(name, 3) for name in names}
    assert slurm.accounted_jobs(names, since=0).keys() == {(name, 3) for name in names}
    # An array of a cluster with a large MaxArraySize, and many arrays.
    ids = {f"7_{index}" for index in range(30_000)} | {f"{array}_3" for array in range(10_000, 20_000)}
    slurm.cancel(ids)
    told = (commands / "ids").read_text().split()
    found = [(word.partition("_")[0], slurm._indices(word.partition("_")[2])) for word in told]
    assert {f"{array}_{index}" for array, indices in found for index in indices} == ids
    assert len(found) < 10_010
    assert slurm.grouped(["12_4", "9", "12_0", "12_5", "12_3", "8_3"]) == ["12_[0,3-5]", "8_3", "9"]


def test_tasks_that_started_and_those_that_never_did_are_told_apart(commands: Path) -> None:
    lines = ["7_0|FAILED|1:0|9|n1|a", "7_[0-1%1]|CANCELLED by 0|0:0|0||a", "8_[1-9:4,20]|CANCELLED|0:0|0||b"]
    lines.append("9|CANCELLED by 0|0:0|0||c")  # the only task of an array, cancelled soon
    write_program(commands / "sacct", *(f"echo '{line}'" for line in lines))
    told = slurm.accounted_jobs(["a", "b", "c"], since=0)
    cancelled = [("c", 0), ("a", 1), ("b", 1), ("b", 5), ("b", 9), ("b", 20)]
    states = {("a", 0): "FAILED"} | dict.fromkeys(cancelled, "CANCELLED")
    assert {key: job.state for key, job in told.items()} == states


def test_slurm_is_asked_for_what_may_be_queued_alone(commands: Path) -> None:
    experiment = made(commands, *[State.PENDING] * 4)
    done, just_done, again, running = experiment.runs
    first = submitted(experiment, old=(done.id, just_done.id, again.id), lost=(running.id,))
    for run, name, index in ((done, "old", 0), (just_done, "old", 1), (running, "lost", 0)):
        job = replace(JOB, name=name, index=index, submission=first)
        claimed(run, processes=1, replay=True, steps=4, job=job)
    for run in (done, just_done):
        run.write_status(replace(run.status(), state=State.COMPLETED))
    write_program(commands / "squeue", f'echo "$@" | grep -o "name=[^ ]*" >> {commands}/asked')
    assert SlurmQueue(experiment).queued == {}
    long_ago = time.time() - 3600
    os.utime(done.status_file, (long_ago, long_ago))
    os.utime(just_done.status_file, (long_ago, long_ago))
    # Submitted again, and one of them as its first job still runs.
    submitted(experiment, new=(again.id, running.id))
    assert SlurmQueue(experiment).queued == {}
    assert (commands / "asked").read_text().split() == ["name=lost,old", "name=lost,new"]
    submitted(experiment, done=(again.id, running.id))
    claimed(again, processes=1, replay=True, steps=4, job=replace(JOB, name="done", submission=first))
    attempt = Attempt(running, 1)
    attempt.write(replace_fields(attempt.description(), job=replace(JOB, name="done", index=1)))
    for run in (again, running):
        run.write_status(replace(run.status(), state=State.COMPLETED))
        os.utime(run.status_file, (long_ago, long_ago))
    write_program(commands / "squeue", "exit 1")
    write_program(commands / "scontrol", "exit 1")
    assert SlurmQueue(experiment).queued == {}


def test_a_command_that_cannot_be_run_leaves_the_queue_unknown(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Or a real one elsewhere on PATH is taken.
    monkeypatch.setenv("PATH", str(commands))
    experiment = made(commands, State.PENDING, State.PENDING)
    submitted(experiment, a=tuple(run.id for run in experiment.runs))
    site = commands / "site.yaml"
    site.write_text("time: '60'\nnetwork_interface: lo\n")
    for how, mode in (("\x7fELF, cut short", 0o755), ("", 0o755), ("#!/nowhere/sh", 0o755), ("#!/bin/sh", 0)):
        slurm.cluster.cache_clear()
        (commands / "squeue").write_text(how + "\necho '\\377 no table'\n")
        (commands / "squeue").chmod(mode)
        told = json.loads(succeeded("status", experiment.folder, "--json").output)
        assert [(run["state"], run["queue_known"]) for run in told] == [("pending", False)] * 2
        assert "squeue" in refusal("launch", experiment.folder, "--site", site)
        assert "squeue" in refusal("cancel", experiment.folder)
        assert "may be queued" in refusal("remove", experiment.folder, experiment.runs[0].id, "--yes")
    slurm.cluster.cache_clear()
    attempt = claimed(experiment.runs[0], processes=1, replay=True, steps=1)
    assert array_task._run_ranks(attempt, TABLE, JOB) is None
    refused = attempt.read(Refused)
    assert refused is not None
    assert refused.reason == "srun cannot be run on n1: No such file or directory"


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    return Experiment(folder=tmp_path, name="e", template="", cells=())


@pytest.mark.parametrize(("gpus", "device"), [(4, "cuda"), (0, None)])
def test_a_job_that_was_given_gpus_does_not_train_on_cpus_where_they_fail(
    gpus: int, device: str | None
) -> None:
    site = replace(find_site("testcluster"), run={"threads": 2})
    shape = JobShape(nodes=1, tasks=4, tasks_per_node=4, cpus_per_task=1, gpus_per_node=gpus)
    assert site_settings_of(shape, site) == {"threads": 2} | ({"device": device} if device else {})
