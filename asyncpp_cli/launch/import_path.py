"""PYTHONPATH of processes that asyncpp starts: asyncpp's own folder first, then the user's folders.

Python reads an empty entry as the working folder, in spite of PYTHONSAFEPATH, and imports the modules found
there in place of installed ones. Such entries come from `PYTHONPATH=` and `PYTHONPATH=$PYTHONPATH:/more`;
they are dropped.
"""

from __future__ import annotations

import os


def import_path(first: str) -> str:
    """PYTHONPATH for a child of this process, beginning with the folder `first`."""
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
