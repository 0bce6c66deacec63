"""What a submitted task runs: a function that is found by its import path, with text for arguments.

A pickle of it holds nothing else, so a job does what the run's folder says when it starts.
"""

from __future__ import annotations

from pathlib import Path

from asyncpp_cli.cluster.attempts import Attempt
from asyncpp_cli.cluster.supervise import supervise
from asyncpp_cli.runs import open_run


def run_rank(run_folder: str, attempt: str, devices: str) -> None:
    """Run the rank that submitit's environment names, under a supervisor.

    Args:
        run_folder: of the run.
        attempt: number of the attempt, which the launcher has claimed.
        devices: GPUs of the attempt's processes on this machine, as CUDA_VISIBLE_DEVICES takes them.

    Raises:
        RuntimeError: the rank did not end well, so that the cluster takes the job for failed too.
    """
    from submitit import JobEnvironment

    environment = JobEnvironment()
    run = open_run(Path(run_folder))
    site = run.config().site
    ended_well = supervise(
        Attempt(run, int(attempt)),
        rank=environment.global_rank,
        size=environment.num_tasks,
        local_rank=environment.local_rank,
        local_size=environment.num_tasks // environment.num_nodes,
        threads=site.threads,
        grace=site.grace,
        devices=devices,
    )
    if not ended_well:
        raise RuntimeError(f"rank {environment.global_rank} of {run.id} did not end well; see {run.logs}")
