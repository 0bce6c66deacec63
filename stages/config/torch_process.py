"""A process that imports torch: a quicker start and end."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def importing_torch() -> Iterator[None]:
    """Import torch in this block: the garbage collector is off, and later ignores what the block imported.

    Its passes over torch's modules, which hold no garbage, take a fifth of the import.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave(code: int) -> NoReturn:
    """Exit without interpreter shutdown.

    With torch it takes about a second, and sometimes torch's threads abort the process then ("terminate
    called without an active exception"): a completed run would count as failed.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
