"""Processes that end with the one that started them: workers of a pool, and programs."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
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


def exit_without(parent: int) -> None:
    """End this program once the process `parent`, which started it without multiprocessing, has ended."""
    threading.Thread(target=_exit_without, args=(parent,), daemon=True).start()


def _exit_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)
