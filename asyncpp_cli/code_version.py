"""Which asyncpp this is: its version, and the commit where that is known."""

from __future__ import annotations

import functools
import json
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def asyncpp_version() -> str:
    """The installed version; "unknown" in a checkout that was never installed."""
    try:
        return distribution("asyncpp").version
    except PackageNotFoundError:
        return "unknown"


@functools.cache
def commit() -> str | None:
    """The git commit of the code that runs, `-dirty` behind it if tracked files were changed.

    Known in a checkout (an editable installation), and where pip installed from a repository's address.
    """
    root = Path(__file__).resolve().parents[1]
    if (root / ".git").exists():
        return commit_of_checkout(root)
    try:
        text = distribution("asyncpp").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    origin = json.loads(text) if text else {}
    found = origin.get("vcs_info", {}).get("commit_id")
    return str(found) if found else None


def commit_of_checkout(root: Path) -> str | None:
    """The commit of a git checkout, `-dirty` behind it if tracked files were changed; None if git fails."""
    ask = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        asked = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip() or None
