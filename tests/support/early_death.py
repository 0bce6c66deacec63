"""Python processes that a signal ends at interpreter start, before they install a handler."""

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
    """Create a folder for PYTHONPATH that ends chosen Python processes at their start.

    Args:
        folder: folder to create.
        deaths: in order, a word of the command line of the process to end, and the signal's name.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SITE)
    (folder / "plan.txt").write_text("\n".join(f"{word} {name}" for word, name in deaths))
    return folder
