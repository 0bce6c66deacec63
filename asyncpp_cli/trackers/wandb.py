"""Runs as offline runs of Weights & Biases, to upload with `wandb sync`."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from asyncpp_cli.base.atomic_files import read_json, write_json
from asyncpp_cli.base.console import quoted
from asyncpp_cli.base.errors import DamagedError, UserError
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.settings import items
from asyncpp_cli.trackers.catalogue import Point, PointReader

AXIS = "update"
"""The x-axis of the curves."""

_OWNER_FILE = "asyncpp.json"
"""Names the run and project of an offline run's folder: experiments may share a folder."""


class WeightsAndBiases:
    """A `Tracker` with an offline run for each run.

    An offline run cannot be appended to: an update writes it whole, in place of the run's earlier mirror. Its
    id follows from the run's, so that uploads of later mirrors update the same run.
    """

    can_append: ClassVar[bool] = False

    def __init__(self, folder: Path, *, project: str) -> None:
        with _offline():
            try:
                import wandb
            except ImportError as error:
                raise UserError(
                    'W&B is not installed: pip install ".[wandb]" in the clone of asyncpp'
                ) from error
        self._wandb = wandb
        self._folder = folder
        self._project = project

    def update(self, run: Run) -> int:
        wandb_id = hashlib.sha256(run.id.encode()).hexdigest()[:16]
        rows = run.rows()
        self._folder.mkdir(parents=True, exist_ok=True)
        earlier = earlier_mirrors(self._folder, wandb_id, project=self._project)
        with _offline():
            offline_run = self._wandb.init(
                mode="offline",
                dir=str(self._folder),
                project=self._project,
                id=wandb_id,
                name=run.id,
                config=dict(items(run.config())),
                settings=self._wandb.Settings(
                    console="off",
                    silent=True,
                    disable_git=True,
                    disable_code=True,
                    x_disable_stats=True,
                    x_disable_meta=True,
                ),
            )
            offline_run.define_metric(AXIS)
            offline_run.define_metric("*", step_metric=AXIS)
            reader = PointReader()
            for row in rows:
                points = [point for point in reader.points(row) if isinstance(point, Point)]
                if points:
                    offline_run.log({AXIS: points[0].update} | {point.tag: point.value for point in points})
            written = Path(offline_run.dir).parent
            offline_run.finish()
        write_json(written / _OWNER_FILE, {"project": self._project, "run": run.id})
        for mirror in earlier:
            if mirror != written:
                shutil.rmtree(mirror)
        return len(rows)

    @property
    def hint(self) -> str:
        return f"Upload: wandb sync {quoted(self._folder)}/wandb/offline-run-*"


def earlier_mirrors(folder: Path, wandb_id: str, *, project: str) -> list[Path]:
    """Folders of earlier mirrors of the same run in the same project."""
    mirrors = []
    for path in (folder / "wandb").glob(f"offline-run-*-{wandb_id}"):
        try:
            owner = read_json(path / _OWNER_FILE, newest_format=0).get("project")
        except FileNotFoundError:
            owner = project  # a mirror that was killed
        except DamagedError:
            continue
        if owner == project and path.is_dir() and not path.is_symlink():
            mirrors.append(path)
    return mirrors


@contextmanager
def _offline() -> Iterator[None]:
    """Keeps W&B from looking for a key or sending anything, whatever the environment says."""
    before = os.environ.get("WANDB_MODE")
    os.environ["WANDB_MODE"] = "offline"
    try:
        yield
    finally:
        if before is None:
            del os.environ["WANDB_MODE"]
        else:
            os.environ["WANDB_MODE"] = before
