"""What worker processes of a pool share."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.process import BaseProcess


def exit_with_parent() -> None:
    """End this process as soon as the one that started it has ended: a pool's workers outlive one that was
    killed. Does nothing in a process that multiprocessing did not start."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()


def _exit_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)
