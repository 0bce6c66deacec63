"""Entry point of a rank in a SLURM job, started by srun.

python -m asyncpp_cli.launch.job.srun_rank RUN_DIR ATTEMPT
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from pathlib import Path

from asyncpp_cli.launch.job import early_signals


def main() -> None:
    """Run this process's rank under a supervisor."""
    # First of all: SLURM may signal as soon as the job has started.
    early_signals.listen(signal.SIGTERM, signal.SIGUSR2)

    from asyncpp_cli.errors import exit_code_of

    code = exit_code_of(_run_rank)
    # Without interpreter shutdown, during which a signal would be fatal.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _run_rank() -> int:
    from asyncpp_cli.launch.supervisor import supervise
    from asyncpp_cli.runs.attempts.attempt import Attempt
    from asyncpp_cli.runs.run_folder import open_run

    run = open_run(Path(sys.argv[1]))
    attempt = Attempt(run, int(sys.argv[2]))
    site = attempt.site()
    ended_well = supervise(
        attempt,
        rank=int(os.environ["SLURM_PROCID"]),
        size=int(os.environ["SLURM_NTASKS"]),
        local_rank=int(os.environ["SLURM_LOCALID"]),
        local_size=tasks_of_node(
            os.environ["SLURM_STEP_TASKS_PER_NODE"], node=int(os.environ["SLURM_NODEID"])
        ),
        threads=site.threads,
        grace=site.grace,
        # On GPUs, SLURM sets CUDA_VISIBLE_DEVICES.
        devices="" if site.device == "cpu" else None,
        received=early_signals.received,
    )
    # 0 after saving on request, or srun would kill the ranks that still save.
    return 0 if ended_well else 1


def tasks_of_node(counts: str, *, node: int) -> int:
    """Number of tasks on a node, from SLURM's list for all nodes: `2(x3),1`."""
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            break
        nodes = int(match[2] or 1)
        if node < nodes:
            return int(match[1])
        node -= nodes
    raise ValueError(f"SLURM's {counts!r} does not say how many tasks node {node} has")


if __name__ == "__main__":
    main()
