"""Claiming a run, so that at most one attempt at it runs at a time.

An attempt is claimed by creating its folder together with its description, which only one process can do on
any filesystem, and only while no other attempt is running.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from asyncpp_cli.base.atomic_files import folder_at_once, write_record
from asyncpp_cli.base.errors import DamagedError
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import Claimed, Job, Scheduler
from asyncpp_cli.runs.attempts.settle import SECONDS_TO_START, Knowledge, settle_locked
from asyncpp_cli.runs.processes import is_gone, this_process
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status, is_done
from stages.config.run_config import SiteConfig


def claim(
    run: Run,
    *,
    processes: int,
    replay: bool,
    steps: int,
    gpus: int = 0,
    threads: int = 1,
    until: int | None = None,
    job: Job | None = None,
    site_settings: Mapping[str, Any] | None = None,
    scheduler: Scheduler | None = None,
) -> Attempt | None:
    """Begin the next attempt at a run; None if the run is done, or running elsewhere.

    Args:
        run: the run.
        processes: number of processes of the attempt.
        replay: whether its ranks take turns in one process.
        steps: steps of the whole run.
        gpus: number of GPUs that the attempt holds.
        threads: threads of each process.
        until: step after which it pauses; None: it trains to the end.
        job: the SLURM job that it runs in.
        site_settings: settings `site.*` of the site profile.
        scheduler: asked whether an attempt that seems to be running has ended.
    """
    with run.locked():
        status = settle_locked(run, Knowledge(scheduler=scheduler))
        if status.state == State.RUNNING or is_done(status, until=until):
            return None
        claimant = this_process()
        now = time.time()
        description = Claimed(
            processes=processes,
            replay=replay,
            gpus=gpus,
            threads=threads,
            until=until,
            lease=_lease(run, site_settings or {}),
            claimed=now,
            monotonic=time.monotonic(),
            by=claimant,
            job=job,
            site=dict(site_settings or {}),
        )
        attempt = Attempt(run, status.attempt + 1)
        while not _create(attempt, description):
            if not _is_abandoned(attempt):
                return None  # another process is claiming it right now
            attempt = Attempt(run, attempt.number + 1)
        # A process of the attempt before that was frozen as it wrote the status cannot go on to do so: it
        # has looked for this attempt's folder after it made its temporary file.
        run.drop_unwritten_status()
        run.logs.mkdir(exist_ok=True)
        run.write_status(
            Status(
                state=State.RUNNING,
                attempt=attempt.number,
                step=run.saved_step or 0,
                steps=steps,
                started=now,
                updated=now,
                host=claimant.host,
                pids=[0] * processes,
            )
        )
        return attempt


def _create(attempt: Attempt, description: Claimed) -> bool:
    """Create the attempt's folder with its description; False if the folder exists."""
    attempt.run.attempts.mkdir(exist_ok=True)
    placed = structs.replace(description, folder=str(attempt.folder.absolute()))
    try:
        with folder_at_once(attempt.folder) as temporary:
            write_record(temporary / attempt.file(Claimed).name, placed)
    except OSError:
        if attempt.folder.exists():
            return False
        raise
    return True


def _lease(run: Run, site_settings: Mapping[str, Any]) -> float:
    """`site.lease` of an attempt; the default if the run's configuration cannot be read."""
    try:
        return replace(run.config().site, **site_settings).lease
    except DamagedError:
        return SiteConfig().lease


def _is_abandoned(attempt: Attempt) -> bool:
    """Whether an attempt that is not in the status was claimed by a process killed while claiming."""
    claimed = attempt.read(Claimed)
    if claimed is None or is_gone(claimed.by):
        return True
    return attempt.seconds() > SECONDS_TO_START


def check_current(attempt: Attempt) -> None:
    """Check that the attempt is the run's latest and has not ended.

    Raises:
        RuntimeError: the attempt has ended, or a later one has begun.
    """
    status = attempt.run.status()
    if status.state != State.RUNNING or status.attempt != attempt.number:
        raise RuntimeError(f"attempt {attempt.number} at {attempt.run.folder} is over: {status.state}")


def record_processes(attempt: Attempt, pids: Sequence[int]) -> None:
    """Write the process ids of all ranks into the run's status; called once, by rank 0.

    Raises:
        RuntimeError: see `check_current`.
    """
    with attempt.run.locked():
        check_current(attempt)
        host = this_process().host
        attempt.run.write_status(
            replace(attempt.run.status(), pids=list(pids), host=host, updated=time.time())
        )
