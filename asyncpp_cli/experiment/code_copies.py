"""Keeps a copy of a run's own code in its folder, with the state of the git repository that it came from.

RUN/code/<module>.py       the files, as their packages hold them
RUN/code/repository.json   commit (ends in -dirty if tracked files differ), whether the diff is whole, and the
                           names and hashes of tracked files that differ and are not copied
RUN/code/changes.diff      the changes of the copied files against that commit, if there are any
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from asyncpp_cli.base.atomic_files import write_json, write_text
from asyncpp_cli.base.version import Checkout, checkout_of
from asyncpp_cli.runs.run_folder import Run
from stages.config.own_code import own_code
from stages.config.run_config import RunConfig

_LONGEST_DIFF = 1 << 20
"""Characters of a diff that are kept."""


@dataclass(frozen=True)
class CodeCopies:
    """Writes the copies of several runs, and asks git once for each place."""

    _checkouts: dict[Path, Checkout | None] = field(default_factory=dict)
    _hashes: dict[Path, str | None] = field(default_factory=dict)

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
        if place not in self._checkouts:
            self._checkouts[place] = checkout_of(place)
        checkout = self._checkouts[place]
        if checkout is None or checkout.changed is None:
            return
        copied = {os.path.relpath(os.path.realpath(file), checkout.root) for file in files.values()}
        changes = (
            (checkout.diff(names) or "") if (names := sorted(copied.intersection(checkout.changed))) else ""
        )
        content = {
            "commit": checkout.commit,
            "diff_is_whole": len(changes) <= _LONGEST_DIFF,
            # Not their content: the folder is often shared, and they may hold secrets.
            "other_changes": {
                name: self._sha256(checkout.root / name) for name in checkout.changed if name not in copied
            },
        }
        write_json(run.code / "repository.json", content)
        if changes:
            write_text(run.code / "changes.diff", f"{changes[:_LONGEST_DIFF]}\n")

    def _sha256(self, file: Path) -> str | None:
        """The hash of a file; None if it was removed, is none or cannot be read."""
        if file not in self._hashes:
            self._hashes[file] = None
            with contextlib.suppress(OSError):
                if stat.S_ISREG(file.lstat().st_mode):
                    with file.open("rb") as opened:
                        self._hashes[file] = hashlib.file_digest(opened, "sha256").hexdigest()
        return self._hashes[file]
