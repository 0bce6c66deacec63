"""A run's metrics as an offline run of Weights & Biases, to be uploaded with `wandb sync`."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncpp_cli.errors import UserError
from asyncpp_cli.runs import Run
from asyncpp_cli.settings import items
from asyncpp_cli.trackers.points import Curves, Point

AXIS = "update"
"""What curves are drawn over."""


def mirror(run: Run, folder: Path, *, project: str) -> int:
    """Write the run anew, in place of an earlier mirror; returns how many rows it has.

    An offline run cannot be added to, so there is no other way than the whole. Its id follows from the run's,
    so uploading a later mirror goes into the same run there.

    Raises:
        UserError: W&B is not installed.
    """
    with _offline():
        try:
            import wandb
        except ImportError as error:
            raise UserError('W&B is not installed; install it with pip install "asyncpp[wandb]"') from error
        folder.mkdir(parents=True, exist_ok=True)
        earlier = list((folder / "wandb").glob("offline-run-*"))
        rows = run.metrics()
        started = wandb.init(
            mode="offline",
            dir=str(folder),
            project=project,
            id=hashlib.sha256(run.id.encode()).hexdigest()[:16],
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
        started.finish()
        for folder_of_earlier in earlier:
            shutil.rmtree(folder_of_earlier)
    return len(rows)


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
