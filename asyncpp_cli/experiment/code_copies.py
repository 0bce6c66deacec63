"""Keeps a copy of a run's own code in its folder, with the state of the git repository that it came from.

RUN/code/<module>.py       the files, as their packages hold them
RUN/code/repository.json   commit (ends in -dirty if tracked files differ), and whether the diff is whole
RUN/code/changes.diff      the changes of tracked files against that commit, if there are any
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from asyncpp_cli.atomic_files import write_json, write_text
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.version import changes_of_checkout, commit_of_checkout
from stages.config import RunConfig
from stages.own_code import own_code

_LONGEST_DIFF = 1 << 20
"""Characters of a diff that are kept."""


@dataclass(frozen=True)
class CodeCopies:
    """Writes the copies of several runs, and asks git once for each place."""

    _repositories: dict[Path, tuple[str | None, str]] = field(default_factory=dict)

    def write(self, run: Run, config: RunConfig) -> None:
        """Write the copy of a run's own code; nothing without any.

        Raises:
            OSError: a file cannot be read or written.
        """
        files = {module: file for found in own_code(config).values() for module, file in found.items()}
        for module, file in files.items():
            end = f"/{file.name}" if file.stem == "__init__" else f".{file.name.partition('.')[2]}"
            copy = run.code / (module.replace(".", "/") + end)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
        if not files:
            return
        place = next(iter(files.values())).parent
        if place not in self._repositories:
            self._repositories[place] = (commit_of_checkout(place), changes_of_checkout(place) or "")
        commit, changes = self._repositories[place]
        if commit is not None:
            whole = len(changes) <= _LONGEST_DIFF
            write_json(run.code / "repository.json", {"commit": commit, "diff_is_whole": whole})
            if changes:
                write_text(run.code / "changes.diff", f"{changes[:_LONGEST_DIFF]}\n")
