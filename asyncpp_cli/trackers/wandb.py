"""A run's metrics as an offline run of Weights & Biases, to be uploaded with `wandb sync`."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncpp_cli.errors import DamagedError, UserError
from asyncpp_cli.files import read_json, write_json
from asyncpp_cli.runs import Run
from asyncpp_cli.settings import items
from asyncpp_cli.trackers.points import Curves, Point

AXIS = "update"
"""What curves are drawn over."""

_MARK = "asyncpp.json"
"""File in the folder of an offline run that says whose it is: experiments may share a folder."""


def mirror(run: Run, folder: Path, *, project: str) -> int:
    """Write the run anew, in place of its own earlier mirror; returns how many rows it has.

    An offline run cannot be added to, so there is no other way than the whole. Its id follows from the run's,
    so uploading a later mirror goes into the same run there.

    Raises:
        UserError: W&B is not installed.
    """
    run_id = hashlib.sha256(run.id.encode()).hexdigest()[:16]
    with _offline():
        try:
            import wandb
        except ImportError as error:
            raise UserError('W&B is not installed; install it with pip install "asyncpp[wandb]"') from error
        folder.mkdir(parents=True, exist_ok=True)
        earlier = _earlier_mirrors(folder, run_id, project=project)
        rows = run.metrics()
        started = wandb.init(
            mode="offline",
            dir=str(folder),
            project=project,
            id=run_id,
            name=run.id,
            config=dict(items(run.config())),
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_meta=True,
            ),
        )
        started.define_metric(AXIS)
        started.define_metric("*", step_metric=AXIS)
        curves = Curves()
        for row in rows:
            points = [point for point in curves.of(row) if isinstance(point, Point)]
            if points:
                started.log({AXIS: points[0].update} | {point.tag: point.value for point in points})
        written = Path(started.dir).parent
        started.finish()
    write_json(written / _MARK, {"project": project, "run": run.id})
    for folder_of_earlier in earlier:
        if folder_of_earlier != written:
            shutil.rmtree(folder_of_earlier)
    return len(rows)


def _earlier_mirrors(folder: Path, run_id: str, *, project: str) -> list[Path]:
    """Folders of earlier mirrors of the same run of the same project; of no other run, whoever wrote it."""
    found = []
    for earlier in (folder / "wandb").glob(f"offline-run-*-{run_id}"):
        try:
            belongs_to = read_json(earlier / _MARK, newest_format=0).get("project")
        except FileNotFoundError:
            belongs_to = project  # a mirror that was killed, or one by a version that left no mark
        except DamagedError:
            continue
        if belongs_to == project and earlier.is_dir() and not earlier.is_symlink():
            found.append(earlier)
    return found


@contextmanager
def _offline() -> Iterator[None]:
    """No key is looked for and nothing is sent, whatever the user's environment says."""
    before = os.environ.get("WANDB_MODE")
    os.environ["WANDB_MODE"] = "offline"
    try:
        yield
    finally:
        if before is None:
            del os.environ["WANDB_MODE"]
        else:
            os.environ["WANDB_MODE"] = before
