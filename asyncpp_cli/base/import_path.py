"""Where programs that asyncpp starts import it from: the same folder as this process."""

from __future__ import annotations

import os
from pathlib import Path


def environment_of_program() -> dict[str, str]:
    """The environment of a Python program of asyncpp that this process starts.

    `python -m` would look in the working folder first, where the user may have a package `optimizers`.
    """
    path = import_path(str(Path(__file__).parents[2]))
    return dict(os.environ) | {"PYTHONSAFEPATH": "1", "PYTHONPATH": path}


def import_path(first: str) -> str:
    """PYTHONPATH for a child of this process, beginning with the folder `first`.

    Python reads an empty entry as the working folder, in spite of PYTHONSAFEPATH, and imports the modules
    found there in place of installed ones. Such entries come from `PYTHONPATH=` and
    `PYTHONPATH=$PYTHONPATH:/more`; they are dropped.
    """
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([first, *filter(None, inherited)])


def import_path_in_bash(first: str) -> list[str]:
    """Lines of bash that set PYTHONPATH as `import_path` does, from the PYTHONPATH where they run.

    Args:
        first: a folder whose name needs no quotes.
    """
    return [
        'PYTHONPATH=":${PYTHONPATH:-}:"',
        'while [[ $PYTHONPATH == *::* ]]; do PYTHONPATH="${PYTHONPATH//::/:}"; done',
        f'export PYTHONPATH="{first}${{PYTHONPATH%:}}"',
    ]
