"""One rank of a job: what srun starts, as `python -m asyncpp_cli.cluster.task RUN_DIR ATTEMPT`."""

from __future__ import annotations

import re
import signal
import sys

from asyncpp_cli.cluster import told


def main() -> None:
    """Run this process's rank under a supervisor."""
    # Before anything else is imported: SLURM may send its signal as soon as the job has begun.
    told.listen(signal.SIGTERM, signal.SIGUSR2)

    import os
    from dataclasses import replace
    from pathlib import Path

    from asyncpp_cli.cluster.attempts import Attempt
    from asyncpp_cli.cluster.supervise import supervise
    from asyncpp_cli.runs import open_run

    run = open_run(Path(sys.argv[1]))
    attempt = Attempt(run, int(sys.argv[2]))
    site = replace(run.config().site, **attempt.site_settings)
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
        # Where the site has GPUs, SLURM says which.
        devices="" if site.device == "cpu" else None,
        told=told.told,
    )
    # A rank that was told to end and has saved ends well: otherwise srun would end those that still save.
    # At once, for a signal would count again while the interpreter ends.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if ended_well else 1)


def tasks_of_node(counts: str, *, node: int) -> int:
    """How many tasks a node has, of SLURM's list for all nodes: `2(x3),1`."""
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
