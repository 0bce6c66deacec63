"""The version of asyncpp, and its commit if known.

Also loaded by setup.py by its path, so module-level imports are from the standard library only.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

RELEASE = "0.1.0"
"""The latest or the next release."""

STAMP_FILE = "build_stamp.json"
"""Holds the `Stamp` in packages built from a checkout; never in a checkout itself."""


@dataclass(frozen=True)
class Stamp:
    """Commit of the code that was built or runs."""

    commit: str | None
    """Ends in `-dirty` if tracked files were changed; None if unknown."""
    released: bool = False
    """Whether this commit is the release."""

    @property
    def version(self) -> str:
        """The release, with the commit as a local label (PEP 440) unless this is the release itself."""
        if self.commit is None or self.released:
            return RELEASE
        return f"{RELEASE}+g{self.commit.replace('-', '.')}"


def asyncpp_version() -> str:
    """The version of the code that runs: 0.1.0, 0.1.0+g<commit> or 0.1.0+g<commit>.dirty."""
    return running_stamp().version


def commit() -> str | None:
    """The git commit of the code that runs, with `-dirty` if it was changed; None if unknown.

    Known in a checkout, in an editable installation, and in packages built from a checkout.
    """
    return running_stamp().commit


@functools.cache
def running_stamp() -> Stamp:
    """The stamp of the code that runs."""
    return stamp_of(Path(__file__).resolve().parents[1])


def stamp_of(root: Path) -> Stamp:
    """The stamp of the code in a folder: a checkout, or a package built from one."""
    if (root / ".git").exists():
        commit = commit_of_checkout(root)
        return Stamp(commit, released=commit is not None and _is_release(root, commit))
    try:
        content = json.loads((root / "asyncpp_cli" / STAMP_FILE).read_text(encoding="utf-8"))
        commit, released = content["commit"], content["released"]
    except (OSError, ValueError, KeyError, TypeError):
        return Stamp(None)
    known = isinstance(commit, str) and re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", commit) is not None
    return Stamp(commit if known else None, released=known and released is True)


def write_stamp(stamp: Stamp, root: Path) -> None:
    """Write the stamp into a copy of the packages outside a checkout."""
    content = {"commit": stamp.commit, "released": stamp.released}
    (root / "asyncpp_cli" / STAMP_FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")


def commit_of_checkout(root: Path) -> str | None:
    """The commit of a git checkout, with `-dirty` if tracked files were changed; None if git fails."""
    return _git(root, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def changes_of_checkout(root: Path) -> str | None:
    """The changes of tracked files in the checkout that holds a folder; None without any, or if git fails."""
    return _git(root, "diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color")


def _is_release(root: Path, commit: str) -> bool:
    tags = _git(root, "tag", "--points-at", "HEAD") or ""
    return not commit.endswith("-dirty") and f"v{RELEASE}" in tags.split()


def _git(root: Path, *arguments: str) -> str | None:
    # git refuses checkouts of another owner, which are common in containers.
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None
