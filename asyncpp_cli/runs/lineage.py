"""Which run another continues.

EXPERIMENT/runs/ID/parent.json   the run and step whose checkpoint a run starts from, and what was changed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from asyncpp_cli.atomic_files import read_json, write_json
from asyncpp_cli.errors import DamagedError
from asyncpp_cli.runs.run_folder import FORMAT, Run

FILE = "parent.json"


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """The run that a run continues."""

    experiment: str
    """Its experiment's folder, absolute, at the time."""
    run: str
    """Its id."""
    step: int
    """Step of the checkpoint that is continued."""
    steps: int
    """Its number of steps in all."""
    changed: Mapping[str, Any]
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


def write_lineage(run: Run, lineage: Lineage) -> None:
    """Write parent.json."""
    write_json(run.folder / FILE, {"format": FORMAT} | asdict(lineage))


def lineage_of(run: Run) -> Lineage | None:
    """The run that this one continues; None for a run from the beginning.

    Raises:
        DamagedError: parent.json cannot be read.
    """
    file = run.folder / FILE
    try:
        content = read_json(file, newest_format=FORMAT)
    except FileNotFoundError:
        return None
    try:
        changed = {str(key): (old, new) for key, (old, new) in content["changed"].items()}
        return Lineage(
            experiment=str(content["experiment"]),
            run=str(content["run"]),
            step=int(content["step"]),
            steps=int(content["steps"]),
            changed=changed,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"{file} is damaged ({error!r})") from error
