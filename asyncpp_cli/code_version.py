"""Which asyncpp this is: its version, and the commit where that is known.

Read by setup.py as well, by its path: it imports nothing but the standard library at its start.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

RELEASE = "0.1.0"
"""The latest release, or the one to come."""

STAMP_FILE = "build_stamp.json"
"""In this package where it was built from a checkout: what `Stamp` says. Never in a checkout itself."""


@dataclass(frozen=True)
class Stamp:
    """The code that was built, or runs."""

    commit: str | None
    """`-dirty` behind it if tracked files were changed; None if unknown."""
    released: bool = False
    """Whether it is the one that the release is made of."""

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
    """The git commit of the code that runs, `-dirty` behind it if it was changed; None if unknown.

    Known in a checkout (an editable installation, too), and where the package was built from one.
    """
    return running_stamp().commit


@functools.cache
def running_stamp() -> Stamp:
    """What is known of the code that runs."""
    from asyncpp_cli.own_packages import changed_files

    root = Path(__file__).resolve().parents[1]
    stamp = stamp_of(root)
    changed = stamp.commit is not None and not stamp.commit.endswith("-dirty") and changed_files()
    return Stamp(f"{stamp.commit}-dirty") if changed else stamp


def stamp_of(root: Path) -> Stamp:
    """What is known of the code in a folder: of a checkout, or of what was built from one."""
    if (root / ".git").exists():
        found = commit_of_checkout(root)
        return Stamp(found, released=found is not None and _is_release(root, found))
    try:
        content = json.loads((root / "asyncpp_cli" / STAMP_FILE).read_text(encoding="utf-8"))
        found, released = content["commit"], content["released"]
    except (OSError, ValueError, KeyError, TypeError):
        return Stamp(None)
    known = isinstance(found, str) and re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", found) is not None
    return Stamp(found if known else None, released=known and released is True)


def write_stamp(stamp: Stamp, root: Path) -> None:
    """Put the stamp into a copy of the packages, which has no checkout around it."""
    content = {"commit": stamp.commit, "released": stamp.released}
    (root / "asyncpp_cli" / STAMP_FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")


def commit_of_checkout(root: Path) -> str | None:
    """The commit of a git checkout, `-dirty` behind it if tracked files were changed; None if git fails."""
    return _asked(root, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _is_release(root: Path, found: str) -> bool:
    tags = _asked(root, "tag", "--points-at", "HEAD") or ""
    return not found.endswith("-dirty") and f"v{RELEASE}" in tags.split()


def _asked(root: Path, *arguments: str) -> str | None:
    # Whoever owns the checkout: in a container that is often somebody else, and git then refuses.
    ask = ["git", "-c", f"safe.directory={root}", "-C", str(root), *arguments]
    try:
        asked = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip() or None
