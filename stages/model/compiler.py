"""Check of the tools that torch.compile needs beside torch. Imports no torch."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path


def missing_for_compile(*, device: str) -> str | None:
    """The tool that `train.compile: true` lacks on this machine, in words; None: nothing is missing.

    torch writes C++ for a CPU and Triton for a GPU, and builds both here, against Python's own headers.

    Args:
        device: `cpu` or `cuda`.
    """
    variable, usual = ("CC", ("gcc", "clang")) if device == "cuda" else ("CXX", _cpp_compilers())
    chosen = os.environ.get(variable)
    wanted = (chosen,) if chosen else usual
    if not any(shutil.which(compiler) for compiler in wanted):
        return f"no compiler is found here: {' or '.join(wanted)} (another can be named by {variable})"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        return f"Python's headers are missing ({header}); they come with the package python3-dev"
    if device == "cuda" and find_spec("triton") is None:
        return "the package triton is missing, which comes with torch's builds for CUDA"
    return None


def _cpp_compilers() -> tuple[str, ...]:
    return ("clang++",) if sys.platform == "darwin" else ("g++",)
