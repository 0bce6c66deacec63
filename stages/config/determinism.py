"""torch's deterministic mode, for runs that ask for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WORKSPACE = ":4096:8"
"""cuBLAS workspace with which its matrix products are reproducible (cuBLAS, "Results reproducibility")."""


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """If `wanted`, make torch use deterministic kernels and refuse operators that have none. On a CPU this
    changes nothing: runs are deterministic there anyway."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
    torch.use_deterministic_algorithms(True)
    # It would fill all newly allocated memory; nothing here reads memory that it has not written.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = fills
