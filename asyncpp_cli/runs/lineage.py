"""Which run a run is: its id, and the run that it continues.

EXPERIMENT/runs/ID/parent.json   the run and step whose checkpoint a run starts from, and what was changed
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from stages.checkpoint.files import Owner
from stages.config.records import Count, FileRecord, Meta

FILE = "parent.json"

_PLAIN_NAME = r"\A[A-Za-z0-9_=][A-Za-z0-9._=-]{0,199}\Z"
"""Of one file that is not hidden: no separators, no "..", not empty."""
_NAME_TEXT = "of up to 200 letters, digits, dots, dashes, = and _ that begins with no dot or dash"

RunId = Annotated[str, Meta(pattern=_PLAIN_NAME, description=f"a run's id {_NAME_TEXT}")]
FolderName = Annotated[str, Meta(pattern=_PLAIN_NAME, description=f"a name {_NAME_TEXT}")]
"""Of a file or folder in a known place."""


class Lineage(FileRecord, frozen=True, kw_only=True):
    """The run that a run continues."""

    experiment: str
    """Its experiment's folder, absolute, at the time."""
    run: RunId
    step: Count
    """Step of the checkpoint that is continued."""
    steps: Count
    """Its number of steps in all."""
    saved_by: Owner
    """The run that the checkpoint names: this one, or one that this one continues itself."""
    changed: dict[str, tuple[Any, Any]]
    """Old and new value of each configuration key that was changed, as a list of two."""

    @property
    def text(self) -> str:
        """On one line, for people."""
        changes = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in self.changed.items())
        return f"continues {self.run} from step {self.step} of {self.steps} ({changes})"

    @property
    def label(self) -> str:
        """The part that all seeds of a cell have in common: a value of the axis `continues`."""
        return f"step {self.step} of {self.steps}"


DIGITS = 8
"""Digits of its hash at the end of a run's id."""


def run_hash(config_sha256: str, *, continues: tuple[str, int] | None = None) -> str:
    """The hash whose first digits end a run's id.

    Args:
        config_sha256: of its configuration (`config_hash`).
        continues: id and step of the run that it continues; None: it starts from the beginning.
    """
    if continues is None:
        return config_sha256
    parent, step = continues
    return hashlib.sha256(f"{config_sha256} {parent} {step}".encode()).hexdigest()
