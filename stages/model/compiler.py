"""Check of the tools that torch.compile needs beside torch. Imports no torch."""

from __future__ import annotations

import getpass
import os
import shutil
import sys
import sysconfig
import tempfile
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
    return _unwritable_cache()


def _unwritable_cache() -> str | None:
    """Why torch cannot write what it compiles. Its own folder is below that of temporary files, and named
    after the user, who may have no name in a container."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    try:
        if not named:
            getpass.getuser()
        folder = Path(named or tempfile.gettempdir())
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, KeyError) as error:
        return (
            f"what is compiled cannot be written to {named or 'the folder of temporary files'} ({error}); "
            "another folder can be named by TORCHINDUCTOR_CACHE_DIR"
        )
    return None


def _cpp_compilers() -> tuple[str, ...]:
    return ("clang++",) if sys.platform == "darwin" else ("g++",)
