"""Entry point of a rank in a local job: a function with text arguments that submitit pickles by import path.

Everything else is read from the run's folder when the job starts.
"""

from __future__ import annotations

from pathlib import Path

from asyncpp_cli.launch.supervisor import supervise
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.run_folder import open_run


def run_rank(run_folder: str, attempt: str, devices: str) -> None:
    """Run the rank that submitit's environment names, under a supervisor.

    Args:
        run_folder: the run's folder.
        attempt: number of the attempt, claimed by the launcher.
        devices: GPUs of the attempt's processes on this machine, as CUDA_VISIBLE_DEVICES takes them.

    Raises:
        RuntimeError: the rank failed, so that submitit marks the job as failed.
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
        raise RuntimeError(f"rank {environment.global_rank} of {run.id} failed; see {run.logs}")
