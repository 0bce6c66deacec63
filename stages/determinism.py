"""torch's deterministic mode, for runs that ask for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WORKSPACE = ":4096:8"
"""Of cuBLAS, with which its products of matrices are the same from run to run (cuBLAS, "Results
reproducibility")."""


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Where `wanted`, let torch take kernels that give the same bits every time, and refuse operators that
    have none. On a CPU that changes nothing: what a run computes there is the same every time anyway."""
    before = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
        torch.use_deterministic_algorithms(True)
        # It would write to all memory that is taken. Nothing here reads what it has not written.
        settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = fills
