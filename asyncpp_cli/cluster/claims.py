"""Taking a run: it is executed at most once at a time.

An attempt is claimed by making its folder with its description in it, which only one process can do, on any
filesystem; and only while no other attempt is going on.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from asyncpp_cli.cluster.attempts import SECONDS_TO_START, Attempt, locked, settle_locked
from asyncpp_cli.cluster.jobs import Job, Scheduler
from asyncpp_cli.cluster.processes import is_gone, process_from, this_process
from asyncpp_cli.files import usual_mask, write_json
from asyncpp_cli.runs import FORMAT, Run, State, Status


def claim(
    run: Run,
    *,
    processes: int,
    replay: bool,
    steps: int,
    job: Job | None = None,
    site_settings: Mapping[str, Any] | None = None,
    scheduler: Scheduler | None = None,
) -> Attempt | None:
    """Begin the next attempt at a run; None if the run is completed, or going on elsewhere.

    Args:
        run: which.
        processes: that the attempt will have.
        replay: whether its ranks take turns in one process.
        steps: of the whole run.
        job: of a cluster, in which it will run.
        site_settings: settings `site.*` of the place where it will run.
        scheduler: is asked about an attempt that is going on as far as its files say.
    """
    with locked(run):
        status = settle_locked(run, scheduler=scheduler)
        if status.state in (State.COMPLETED, State.RUNNING):
            return None
        me = this_process()
        now = time.time()
        description = {
            "format": FORMAT,
            "processes": processes,
            "replay": replay,
            "claimed": now,
            "by": asdict(me),
            "job": asdict(job) if job else None,
            "site": dict(site_settings or {}),
        }
        attempt = Attempt(run, status.attempt + 1)
        while not _make(attempt, description):
            if not _is_left_over(attempt):
                return None  # somebody claims it at this moment
            attempt = Attempt(run, attempt.number + 1)
        run.logs.mkdir(exist_ok=True)
        run.write_status(
            Status(
                state=State.RUNNING,
                attempt=attempt.number,
                steps=steps,
                started=now,
                updated=now,
                host=me.host,
                pids=[0] * processes,
            )
        )
        return attempt


def _make(attempt: Attempt, description: Mapping[str, Any]) -> bool:
    """Make the attempt's folder, description included, if it is not there: of many who try, one succeeds."""
    attempt.run.attempts.mkdir(exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=".claim-", dir=attempt.run.attempts))
    try:
        making.chmod(0o777 & ~usual_mask())
        write_json(making / "attempt.json", description)
        # Renaming replaces an empty folder at most, never one with a description in it.
        os.rename(making, attempt.folder)  # noqa: PTH104 (Path.replace says less plainly what is relied on)
    except OSError:
        shutil.rmtree(making, ignore_errors=True)
        if attempt.folder.exists():
            return False
        raise
    return True


def _is_left_over(attempt: Attempt) -> bool:
    """Whether an attempt that the status does not know was claimed by a process that was killed over it."""
    description = attempt.read("attempt")
    if description is None:
        return True
    if is_gone(process_from(description["by"])):
        return True
    return bool(time.time() - description["claimed"] > SECONDS_TO_START)


def enter(attempt: Attempt, rank: int) -> None:
    """Put this process into the run's status, as that rank.

    Raises:
        RuntimeError: the attempt is over, or another has taken its place.
    """
    with locked(attempt.run):
        status = attempt.run.status()
        if status.state != State.RUNNING or status.attempt != attempt.number:
            raise RuntimeError(f"attempt {attempt.number} at {attempt.run.folder} is over: {status.state}")
        me = this_process()
        pids = [me.pid if index == rank else pid for index, pid in enumerate(status.pids)]
        attempt.run.write_status(replace(status, pids=pids, host=me.host, updated=time.time()))
