"""What a tracker provides."""

from __future__ import annotations

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
