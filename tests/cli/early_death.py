"""Processes that a signal ends before they listen: as soon as their interpreter begins, not by chance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_SITE = """\
import os, signal, sys
from pathlib import Path

plan = Path(__file__).with_name("plan.txt")
lines = plan.read_text().splitlines()
if lines and lines[0].split()[0] in sys.orig_argv:
    plan.write_text("\\n".join(lines[1:]))
    os.kill(os.getpid(), signal.Signals[lines[0].split()[1]])
"""


def dying(folder: Path, deaths: Sequence[tuple[str, str]]) -> Path:
    """A folder for PYTHONPATH in which Python processes die.

    Args:
        folder: to be made.
        deaths: in their order, a word of the command line of the process that dies, and the signal.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SITE)
    (folder / "plan.txt").write_text("\n".join(f"{word} {name}" for word, name in deaths))
    return folder
