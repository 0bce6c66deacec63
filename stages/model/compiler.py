"""Which runs compile their blocks, and the tools that torch.compile needs. Imports no torch."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import stat
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

import schedules
from stages.config.run_config import RunConfig
from stages.config.segments import segment_program, sync_steps
from stages.data.dataset import cache_folder

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""torch's variable for the folder of what it compiles; Triton's is below it."""


def compile_refusal(config: RunConfig) -> str | None:
    """Why the blocks of a run cannot be compiled, on any machine; None: they can."""
    if config.model.factory is not None:
        return "goes with the decoder, not with model.factory; accepted with it: false"
    program = segment_program(config, first_step=sync_steps(config), steps=3)
    if config.train.recompute != "full" and max(schedules.analyze(program).mismatch_max) > 0:
        return (
            f"under {config.schedule.name} weights change between forward and backward, and which "
            "activations a compiled block keeps, and which it computes anew from the newer weights, is the "
            "compiler's choice; accepted with it: train.recompute: full (all are computed anew)"
        )
    return None


def is_compiled(config: RunConfig, *, device: str) -> bool:
    """Whether a run wants its blocks compiled: `train.compile`; null: on a GPU, if they can be.

    Args:
        config: a valid configuration.
        device: `cpu` or `cuda`.
    """
    if config.train.compile is not None:
        return config.train.compile
    return device == "cuda" and compile_refusal(config) is None


def compiles_here(config: RunConfig, *, device: str) -> bool:
    """Whether this machine compiles a run's blocks. If `train.compile` is null, it need not have the tools.

    Raises:
        RuntimeError: `train.compile` is true, and the tools are missing.
    """
    if not is_compiled(config, device=device):
        return False
    missing = missing_for_compile(device=device)
    if missing is not None and config.train.compile:
        raise RuntimeError(f"train.compile is true, but {missing}; install it, or set train.compile: false")
    return missing is None


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
    """Why torch cannot write what it compiles, and runs when it finds it there; None: it is told where to.

    Its usual folder is below that of temporary files and named after the user, so another user may have made
    it. Where that is so, or others may write there, the one below our cache takes its place.
    """
    named = os.environ.get(_CACHE)
    try:
        folder = Path(named) if named else _usual_cache()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not named and not _is_own(folder):
            cache = cache_folder()
            if cache is None:
                raise PermissionError(f"others may write to {folder}, and there is no home for another")
            folder = cache / "torchinductor"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_own(folder):
                raise PermissionError(f"others may write to {folder}")
        tempfile.TemporaryFile(dir=folder).close()
        os.environ[_CACHE] = str(folder)
    except (OSError, KeyError) as error:
        return (
            f"what is compiled cannot be written to {named or 'the folder of temporary files'} ({error}); "
            f"another folder can be named by {_CACHE}"
        )
    return None


def _usual_cache() -> Path:
    """torch's own default."""
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    return Path(tempfile.gettempdir()) / f"torchinductor_{user}"


def _is_own(folder: Path) -> bool:
    """Whether only this user decides what is in a folder: no link, and others may not write or rename it."""
    own, above = folder.lstat(), folder.parent.stat()
    replaceable = above.st_mode & 0o002 and not above.st_mode & stat.S_ISVTX
    return (
        stat.S_ISDIR(own.st_mode)
        and own.st_uid == os.geteuid()
        and not own.st_mode & 0o022
        and not replaceable
    )


def _cpp_compilers() -> tuple[str, ...]:
    return ("clang++",) if sys.platform == "darwin" else ("g++",)
