"""What a tracker provides, and the trackers by name: a class in a module of its own, and a line here."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from asyncpp_cli.runs.run_folder import Run


class Tracker(Protocol):
    """Mirrors of runs in the format of a tracker.

    Args:
        folder: of the mirrors.
        project: name that groups the runs.

    Raises:
        UserError: the tracker's library is not installed.
    """

    can_append: ClassVar[bool]
    """Whether a mirror grows with its run; otherwise it is written whole each time."""

    def __init__(self, folder: Path, *, project: str) -> None: ...

    def update(self, run: Run) -> int:
        """Bring the run's mirror up to date; returns the number of rows read."""

    @property
    def hint(self) -> str:
        """The command to run next."""


TRACKERS = {
    "tensorboard": "TensorBoard",
    "wandb": "WeightsAndBiases",
}
"""The class of each tracker, by the name of its module."""


def tracker_class(name: str) -> type[Tracker]:
    """The tracker of this name, a key of `TRACKERS`."""
    module = importlib.import_module(f"asyncpp_cli.trackers.{name}")
    tracker: type[Tracker] = getattr(module, TRACKERS[name])
    return tracker
