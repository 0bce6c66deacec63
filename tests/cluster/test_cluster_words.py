"""What is said of runs whose jobs ended early, or that SLURM does not tell of. Nothing trains here."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from support.cluster_runs import (
    ONE_RUN,
    launch,
    sbatch,
    scontrol,
    set_partition,
    site_file,
    squeue,
    status_of,
    wait_for,
    without_controller,
)
from support.command_line import asyncpp, refusal, succeeded
from support.launches import started_process
from support.privileges import User, disk, fill

from asyncpp_cli.doctor.job import job_checks
from asyncpp_cli.launch.job.time_limit import first_end_time, time_limit
from asyncpp_cli.launch.start import runs_to_retry
from asyncpp_cli.runs.attempts.files import Job
from asyncpp_cli.runs.experiment_folder import Experiment, open_experiment
from asyncpp_cli.sites.profile import find_site
from asyncpp_cli.slurm import client as slurm

TWO = [*ONE_RUN, "matrix.seed=[0,1]", "train.steps=2"]


def sweep(folder: Path, *changes: str) -> Experiment:
    succeeded("sweep", "quickstart", "model=micro", *TWO, *changes, "--out", folder)
    return open_experiment(folder)


def following(experiment: Experiment, site: Path, **options: Any) -> AbstractContextManager[Popen[Any]]:
    """A launch that waits until its jobs have ended."""
    words = ["launch", str(experiment.folder), "--site", str(site), "--replay", "--wait"]
    return started_process([sys.executable, "-P", "-m", "asyncpp_cli", *words], **options)


def test_a_job_that_ended_before_it_claimed_its_run_is_a_failure_with_its_log(
    slurm_conf: Path, tmp_path: Path
) -> None:
    experiment = sweep(tmp_path / "e")
    first, second = experiment.runs
    # A module that is not there is no reason for the others of the list to be left out.
    site = site_file(tmp_path, setup=["true", "module load no/such 2> /dev/null", "touch later"])
    doctor = {check.check: check for check in job_checks(find_site(str(site)), tmp_path)}
    failed = "module load no/such 2> /dev/null (setup of the site) failed with exit code 127"
    assert doctor["job"].detail.endswith(f"left no answer: {failed}")
    succeeded("launch", experiment.folder, "--site", site, "--replay")
    wait_for(lambda: not squeue(), seconds=100, why=squeue)
    assert not list(experiment.submissions.glob("*/later"))
    wait_for(lambda: {run["job_state"] for run in status_of(experiment.folder)} == {"FAILED"}, seconds=60)
    told = json.loads(asyncpp("status", experiment.folder, "--json").output)
    assert [(run["state"], run["attempt"]) for run in told] == [("failed", 0)] * 2
    for index, run in enumerate(told):
        job = run["job_id"]
        assert job.endswith(f"_{index}")
        reason = f"its job {job} ended before the run began (FAILED, exit code 1): {failed}"
        assert run["reason"].startswith(f"{reason} (submissions/")
        assert run["reason"].endswith(f"/{job}.out)")
        assert run["error_lines"] == [failed]
    assert "ended before the run began" in asyncpp("status", experiment.folder).output
    assert asyncpp("logs", experiment.folder, first.id).output == f"{failed}\n"
    chosen = {"named": set(), "failed": True, "timeout": False, "oom": False}
    assert runs_to_retry(experiment, **chosen) == {first.id: str(site), second.id: str(site)}
    # What the run does later is the later word.
    succeeded("train", second.folder, "--replay")
    assert [run["state"] for run in status_of(experiment.folder)] == ["failed", "completed"]
    # Nobody is made to run what the profile of another says.
    assert f"accepted: --site {site}, if you trust" in refusal("launch", experiment.folder, "--failed")
    again = succeeded("launch", experiment.folder, "--failed", "--site", site)
    assert "Submitted 1 of 2 runs to site" in again.errors


def test_a_job_cancelled_while_it_waited_is_no_failure(slurm_conf: Path, tmp_path: Path) -> None:
    experiment = sweep(tmp_path / "e")
    set_partition("down")
    succeeded("launch", experiment.folder, "--site", site_file(tmp_path), "--replay")
    array = status_of(experiment.folder)[0]["job_id"].partition("_")[0]
    # A job cancelled before the accounting has heard of it is never in it.
    listed = ["sacct", "--noheader", "--jobs", array]
    wait_for(lambda: subprocess.run(listed, check=True, timeout=60, capture_output=True).stdout, seconds=60)
    subprocess.run(["scancel", array], check=True, timeout=60)
    wait_for(lambda: status_of(experiment.folder)[0]["job_state"] == "CANCELLED", seconds=60)
    for index, run in enumerate(status_of(experiment.folder)):
        cancelled = f"its job {array}_{index} was cancelled before the run began"
        assert (run["state"], run["reason"]) == ("pending", cancelled)


def test_where_slurm_does_not_answer_nothing_is_called_pending_or_failed(
    slurm_conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = sweep(tmp_path / "e")
    set_partition("down")
    succeeded("launch", experiment.folder, "--site", site_file(tmp_path), "--replay")
    assert asyncpp("status", experiment.folder).errors == ""
    monkeypatch.setenv("SLURM_CONF", str(without_controller(slurm_conf, tmp_path)))
    shown = asyncpp("status", experiment.folder)
    assert shown.output.startswith("quickstart: 2 unknown\n"), shown.output
    assert shown.output.count("queued, or pending") == 2
    assert shown.errors.startswith("Which runs are queued is unknown: s")
    assert shown.errors.count("\n") == 1
    told = status_of(experiment.folder)
    assert [(run["state"], run["queue_known"]) for run in told] == [("pending", False)] * 2


def test_the_end_that_a_preemption_sets_is_no_time_limit(slurm_conf: Path, tmp_path: Path) -> None:
    number = sbatch("--output=/dev/null", "--time=60", "--array=0", "--wrap=sleep 600")
    job = Job(
        cluster="testcluster", name="x", index=0, id=f"{number}_0", restart=0, nodes="n1", submission="s"
    )
    wait_for(lambda: f"{job.id}|RUNNING" in squeue(), seconds=60, why=squeue)
    first_end_time(job.id)
    # What SLURM does with the job's end as it preempts it.
    scontrol("update", f"JobId={job.id}", "TimeLimit=1")
    limit = time_limit(job.id)
    assert limit is not None
    assert limit > time.monotonic() + 1200


def test_a_launch_that_waits_for_room_submits_nothing_that_was_cancelled(
    slurm_conf: Path, tmp_path: Path
) -> None:
    experiment = sweep(tmp_path / "e")
    set_partition("down")
    site = site_file(tmp_path, submit_limit=1)
    with following(experiment, site, stderr=subprocess.DEVNULL) as launching:
        wait_for(lambda: len(squeue()) == 1, seconds=60, why=squeue)
        assert asyncpp("cancel", experiment.folder).errors == "Cancelled: 1 queued, 0 running.\n"
        assert launching.wait(timeout=60) == 1
    assert squeue() == []
    assert len(list(experiment.submissions.glob("*/submission.json"))) == 1


def test_a_held_job_is_released_by_the_command_that_is_printed(slurm_conf: Path, tmp_path: Path) -> None:
    experiment = sweep(tmp_path / "e")
    site = site_file(tmp_path)
    with no_job_can_start(slurm_conf.parents[1]):
        succeeded("launch", experiment.folder, "--site", site, "--replay")
        wait_for(lambda: len(squeue("%r")) == 2 and set(squeue("%r")) == {FAILED_TO_START}, seconds=60)
    array = squeue("%F")[0]
    held = f"2 runs wait until released ({FAILED_TO_START}): scontrol release '{array}_[0-1]'"
    assert asyncpp("status", experiment.folder).errors.splitlines() == [held]
    assert held in succeeded("launch", experiment.folder, "--site", site).errors.splitlines()
    said = tmp_path / "said"
    with said.open("w") as errors, following(experiment, site, stderr=errors) as launching:
        wait_for(lambda: held in said.read_text().splitlines(), seconds=60, why=said.read_text)
        subprocess.run(held.partition("): ")[2], shell=True, check=True, timeout=60)
        assert FAILED_TO_START not in squeue("%r")
        # By a person: only one of the two, until later.
        scontrol("uhold", f"{array}_1")
        wait_for(lambda: "JobHeldUser" in squeue("%r"), seconds=60, why=squeue)
        (line,) = asyncpp("status", experiment.folder).errors.splitlines()
        assert line == f"1 run waits until released (JobHeldUser): scontrol release {array}_1"
        wait_for(lambda: line in said.read_text().splitlines(), seconds=60, why=said.read_text)
        assert asyncpp("cancel", experiment.folder).errors == "Cancelled: 2 queued, 0 running.\n"
        assert launching.wait(timeout=60) == 1
    assert said.read_text().splitlines().count(held) == 1


FAILED_TO_START = "launch failed requeued held"


@contextmanager
def no_job_can_start(cluster: Path) -> Iterator[None]:
    """The nodes find no folder for a job's script, as on a full disk: SLURM holds the job."""
    folders = list((cluster / "spool").iterdir())
    try:
        for folder in folders:
            folder.rename(folder.with_name(f"aside-{folder.name}"))
            folder.touch()
        yield
    finally:
        for folder in folders:
            folder.unlink(missing_ok=True)
            folder.with_name(f"aside-{folder.name}").rename(folder)


def test_a_full_disk_does_not_keep_jobs_from_being_cancelled(slurm_conf: Path, tmp_path: Path) -> None:
    with disk(tmp_path / "disk", megabytes=16) as folder:
        experiment = sweep(folder / "e")
        set_partition("down")
        launch(experiment.folder, "--replay", site=site_file(tmp_path))
        room = fill(folder)
        ended = asyncpp("cancel", experiment.folder)
        assert squeue() == []
        assert ended.code == 1
        assert ended.errors.startswith(
            "Cancelled: 2 queued, 0 running. An open launch may start them again:\n"
        )
        assert "cancelled.jsonl cannot be written (No space left on device" in ended.errors
        room.unlink()
        succeeded("cancel", experiment.folder)


def test_an_open_launch_goes_on_after_a_cancel_that_slurm_refused(slurm_conf: Path, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="asyncpp-") as outer:
        Path(outer).chmod(0o755)
        stranger = User(54331, group=54400, umask=0o002, home=Path(outer) / "home")
        if not stranger.permitted():
            pytest.skip("not permitted here: acting as another user")
        experiment = sweep(Path(outer) / "e")
        experiment.folder.chmod(0o777)
        set_partition("down")
        site = site_file(tmp_path, submit_limit=1)
        said = tmp_path / "said"
        with said.open("w") as errors, following(experiment, site, stderr=errors) as launching:
            wait_for(lambda: len(squeue()) == 1, seconds=60, why=squeue)
            refused = stranger.run("cancel", experiment.folder)
            assert (refused.code, "Kill job error" in refused.errors) == (2, True), refused.errors
            assert len(squeue()) == 1
            # A controller that does not answer: nothing is even recorded.
            before = (experiment.folder / "cancelled.jsonl").read_bytes()
            with pytest.MonkeyPatch.context() as patched:
                patched.setenv("SLURM_CONF", str(without_controller(slurm_conf, tmp_path)))
                slurm.cluster.cache_clear()
                assert asyncpp("cancel", experiment.folder).code == 2
            slurm.cluster.cache_clear()
            assert (experiment.folder / "cancelled.jsonl").read_bytes() == before
            set_partition("up")
            assert launching.wait(timeout=150) == 0, said.read_text()
        assert "cancelling failed for user 54331" in said.read_text()


def test_a_job_whose_experiment_was_moved_says_so(slurm_conf: Path, tmp_path: Path) -> None:
    experiment = sweep(tmp_path / "e")
    set_partition("down")
    launch(experiment.folder, "--replay", site=site_file(tmp_path))
    experiment.folder.rename(tmp_path / "moved")
    set_partition("up")
    wait_for(lambda: not squeue(), seconds=100, why=squeue)
    wait_for(lambda: {run["job_state"] for run in status_of(tmp_path / "moved")} == {"FAILED"}, seconds=60)
    for run in status_of(tmp_path / "moved"):
        assert "(FAILED: SLURM could not enter its folder or write its output there; was" in run["reason"]


def test_a_job_on_a_full_disk_ends_with_a_line(slurm_conf: Path, tmp_path: Path) -> None:
    with disk(tmp_path / "disk", megabytes=16) as folder:
        experiment = sweep(folder / "e")
        set_partition("down")
        launch(experiment.folder, "--replay", site=site_file(tmp_path))
        outputs = [Path(f"{line.partition('|')[0]}.out") for line in squeue()]
        (submitted,) = experiment.submissions.glob("*/submission.json")
        for output in outputs:
            # A page that the job's output can have, where nothing else can be written.
            (submitted.parent / output).write_text(" ")
        fill(folder)
        set_partition("up")
        wait_for(lambda: not squeue(), seconds=100, why=squeue)
        for output in outputs:
            said = (submitted.parent / output).read_text()
            assert "(No space left on device: free some space)" in said
            assert "Traceback" not in said


def test_many_jobs_are_cancelled_in_one_request_for_each_array(
    slurm_conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_partition("down")
    arrays = [sbatch("--output=/dev/null", "--array=0-49", "--wrap=true") for _ in range(4)]
    before = len((slurm_conf.parents[1] / "log/slurmctld.log").read_text().splitlines())
    kept = f"{arrays[0]}_7"
    slurm.cancel(
        [f"{array}_{index}" for array in arrays for index in range(50) if f"{array}_{index}" != kept]
    )
    assert [line.partition("|")[0] for line in squeue()] == [kept]
    log = (slurm_conf.parents[1] / "log/slurmctld.log").read_text().splitlines()[before:]
    assert sum("REQUEST_KILL_JOB" in line for line in log) == len(arrays)
    # Ended ones are no error, alone or beside others.
    slurm.cancel([kept, f"{arrays[0]}_8"])
    slurm.cancel([kept])
    assert squeue() == []
