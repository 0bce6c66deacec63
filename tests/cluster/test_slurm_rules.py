"""What we rely on SLURM for, each rule seen in a SLURM that runs: docs/slurm.md tells them to users."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest
from support.cluster_runs import hurry, preempt_all, sbatch, scontrol, set_partition, squeue, wait_for

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.launch.submission.sbatch import check_folder_name
from asyncpp_cli.slurm import client as slurm
from asyncpp_cli.slurm.client import KNOWN, JobPhase, phase_of


@pytest.fixture
def sleepers(slurm_conf: Path, tmp_path: Path) -> str:
    """An array of three tasks that sleep, all running. SLURM's number for it."""
    array = sbatch("--array=0-2", f"--output={tmp_path}/%A_%a.out", "--requeue", "--wrap=exec sleep 600")
    wait_for(lambda: states(array) == ["RUNNING"] * 3, seconds=60, why=squeue)
    return array


def states(array: str) -> list[str]:
    """Of the array's tasks, by index."""
    lines = sorted(line.split("|") for line in squeue("%F", "%K", "%T"))
    return [state for job, _, state in lines if job == array]


def test_one_task_has_the_arrays_own_id_and_is_told_from_the_array_by_its_name(sleepers: str) -> None:
    raw_ids = dict(line.split("|") for line in squeue("%F_%K", "%A"))
    (same,) = [task for task, raw in raw_ids.items() if raw == sleepers]
    # By the raw id SLURM takes it for the array.
    command = ["squeue", "-h", "-j", sleepers, "-o", "%T"]
    assert (
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() == ["RUNNING"] * 3
    )
    assert slurm.job_state(same) == "RUNNING"
    assert slurm.job_end_time(same) is not None
    slurm.requeue(same)
    wait_for(lambda: slurm.job_state(same) == "PENDING", seconds=60, why=squeue)
    assert sorted(states(sleepers)) == ["PENDING", "RUNNING", "RUNNING"]


def test_jobs_that_ask_for_a_shard_share_a_gpu_and_see_it(slurm_conf: Path, tmp_path: Path) -> None:
    told = "srun --ntasks=1 bash -c 'echo \"gpu $CUDA_VISIBLE_DEVICES\" >> told'; exec sleep 600"
    words = ["--array=0-2", "--nodelist=n1", f"--chdir={tmp_path}", "--output=/dev/null", f"--wrap={told}"]
    array = sbatch("--gres=shard:1", *words)
    wait_for(lambda: said(tmp_path / "told") == 2, seconds=60, why=squeue)
    assert (tmp_path / "told").read_text() == "gpu 0\n" * 2
    # The node's GPU has two shards.
    assert states(array) == ["RUNNING", "RUNNING", "PENDING"]


def test_a_job_that_is_queued_again_keeps_its_name(slurm_conf: Path, tmp_path: Path) -> None:
    told = 'echo "$SLURM_RESTART_COUNT on $SLURM_JOB_NODELIST" >> starts; exec sleep 600'
    array = sbatch("--array=0", f"--chdir={tmp_path}", "--output=/dev/null", "--requeue", f"--wrap={told}")
    job, starts = f"{array}_0", tmp_path / "starts"
    for count in (1, 2):
        wait_for(lambda count=count: said(starts) >= count, seconds=60, why=squeue)  # type: ignore[misc]
        assert phase_of(slurm.job_state(job)) is JobPhase.RUNNING
        slurm.requeue(job)
        # The node has just revoked its credential: at once it would refuse the job, and SLURM would end it.
        wait_for(lambda count=count: begun(starts, count + 1), seconds=60, why=squeue)  # type: ignore[misc]
    restarts = [line.partition(" on ")[0] for line in starts.read_text().splitlines()]
    assert [int(count or 0) for count in restarts] == [0, 1, 2]


def said(file: Path) -> int:
    """Lines that a job has written."""
    return len(file.read_text().splitlines()) if file.exists() else 0


def begun(file: Path, times: int) -> bool:
    hurry()
    return said(file) >= times


def test_a_job_is_signaling_while_a_node_does_not_acknowledge_and_runs(slurm_conf: Path) -> None:
    job = sbatch("--output=/dev/null", "--wrap=exec sleep 600")
    wait_for(lambda: slurm.job_state(job) == "RUNNING", seconds=60, why=squeue)
    (node,) = squeue("%N")
    daemon = int((slurm_conf.parents[1] / f"run/slurmd.{node}.pid").read_text())
    os.kill(daemon, signal.SIGSTOP)
    try:
        slurm.cancel([job], signal="CONT")
        wait_for(lambda: slurm.job_state(job) == "SIGNALING", seconds=30, why=squeue)
        assert phase_of("SIGNALING") is JobPhase.RUNNING
    finally:
        os.kill(daemon, signal.SIGCONT)
    wait_for(lambda: slurm.job_state(job) == "RUNNING", seconds=60, why=squeue)


def test_a_signal_to_a_job_that_ends_meanwhile_is_no_error(slurm_conf: Path) -> None:
    set_partition("down")
    job = sbatch("--output=/dev/null", "--wrap=true")
    # scancel tries again after 5 s while a job is pending, and fails without a message if it has ended then.
    with ThreadPoolExecutor() as pool:
        signalled = pool.submit(slurm.cancel, [job], signal="USR2")
        time.sleep(2)
        slurm.cancel([job])
    signalled.result()


def test_sruns_exit_code_is_that_of_the_signal_that_killed_a_task(slurm_conf: Path, tmp_path: Path) -> None:
    tasks = [
        "srun -n1 sh -c 'kill -TERM $$'",
        "srun -n1 sh -c 'kill -USR2 $$'",
        # The highest of its tasks.
        "srun -n2 --wait=0 sh -c 'test $SLURM_PROCID = 0 && exit 1; sleep 1; kill -USR2 $$'",
    ]
    script = "\n".join(f"{task}; echo $? >> codes" for task in tasks)
    sbatch(f"--chdir={tmp_path}", "--ntasks=2", "--output=/dev/null", f"--wrap={script}")
    codes = tmp_path / "codes"
    wait_for(lambda: said(codes) == 3, seconds=60, why=squeue)
    assert codes.read_text().split() == ["143", "140", "140"]


def test_before_a_preemption_and_a_time_limit_the_ranks_get_a_signal_and_the_script_none(
    slurm_conf: Path, tmp_path: Path
) -> None:
    rank = 'trap "echo rank TERM >> $0; exit" TERM; trap "echo rank USR2 >> $0; exit" USR2; '
    rank += "echo begun >> $0; while :; do sleep 0.1; done"
    preempted, limited = tmp_path / "preempted", tmp_path / "limited"
    jobs = []
    for file in (preempted, limited):
        script = f"trap 'echo script >> {file}' TERM USR2\nsrun sh -c '{rank}' {file}\necho ended >> {file}"
        jobs.append(sbatch("--output=/dev/null", "--signal=USR2@50", f"--wrap={script}"))
    wait_for(lambda: said(preempted) == said(limited) == 1, seconds=60, why=squeue)
    scontrol("update", f"JobId={jobs[1]}", "TimeLimit=1")
    wait_for(lambda: said(limited) >= 3, seconds=100, why=squeue)
    preempt_all()
    wait_for(lambda: said(preempted) >= 3, seconds=60, why=squeue)
    assert limited.read_text().splitlines() == ["begun", "rank USR2", "ended"]
    assert preempted.read_text().splitlines() == ["begun", "rank TERM", "ended"]


def test_a_cancelled_job_shows_as_its_end_the_time_of_the_cancellation(
    slurm_conf: Path, tmp_path: Path
) -> None:
    """Taken for its time limit, it would make the job queue itself again."""
    begun_file = tmp_path / "begun"
    # The shell outlives the signal until SLURM kills it.
    job = sbatch(
        "--output=/dev/null", f"--wrap=trap '' TERM; echo >> {begun_file}; while :; do sleep 1; done"
    )
    wait_for(lambda: said(begun_file), seconds=60, why=squeue)
    limit = slurm.job_end_time(job)
    assert limit is not None
    slurm.cancel([job])
    shown = dict(line.split("|") for line in squeue("%A", "%e"))[job]
    assert datetime.fromisoformat(shown).timestamp() < limit - 300
    assert phase_of(slurm.job_state(job)) is JobPhase.ENDING
    assert slurm.job_end_time(job) is None


def test_a_job_that_slurm_does_not_have_is_gone(slurm_conf: Path) -> None:
    assert slurm.job_state("999999_0") == "gone"
    assert slurm.job_end_time("999999") is None


def test_no_word_of_this_slurm_for_a_state_is_undecided(slurm_conf: Path) -> None:
    """Asked for a state that it does not know, squeue lists those that it does."""
    asked = ["squeue", "--states=nonsense"]
    said = subprocess.run(asked, timeout=60, check=False, capture_output=True, text=True).stderr
    words = said.rpartition("Valid job states include: ")[2].strip().split(",")
    assert "SIGNALING" in words, said
    assert [word for word in words if word not in KNOWN] == []


def test_a_folder_is_refused_if_slurm_writes_the_jobs_output_elsewhere(
    slurm_conf: Path, tmp_path: Path
) -> None:
    names = ["a 'b", "50% c", "d%z", "e%", "f\\g", "h%%", "i%5q", *(f"%{letter}" for letter in "AajJnNstux")]
    for name in names:
        (tmp_path / name).mkdir()
        sbatch(f"--chdir={tmp_path / name}", "--output=%A_%a.out", "--array=0", "--wrap=true")
    wait_for(lambda: not squeue(), seconds=100, why=squeue)
    written = [name for name in names if list((tmp_path / name).iterdir())]
    accepted = []
    for name in names:
        with suppress(UserError):
            check_folder_name(tmp_path / name)
            accepted.append(name)
    assert written == accepted == ["a 'b", "50% c", "d%z", "e%"]
