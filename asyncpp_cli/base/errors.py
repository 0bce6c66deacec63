"""Errors of the user and of the system, their messages and exit codes.

| error | exit code |
|---|---|
| a mistake of the user; a file that cannot be read, written or made | 2 |
| a resource is exhausted or an output is closed: the same command may succeed later | 1 |
| another machine has taken over the run | 1 |
| a bug of asyncpp: a traceback, and where to report it | 1 |

docs/index.md lists the exit codes of all commands.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stages.config.records import DamagedError as DamagedError

WRONG = 2
"""Exit code if the command, or what it works on, must be changed."""

FAILED = 1
"""Exit code if the same command may succeed later, and if runs have failed."""

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


class UserError(Exception):
    """A mistake of the user: one line on standard error, exit code 2."""


class TakenOverError(Exception):
    """Another machine has taken over the run: one line on standard error, exit code 1."""


@dataclass(frozen=True)
class Refusal:
    """Message and exit code of an error that is not a bug of asyncpp."""

    message: str
    code: int


FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk."""
_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or ask for a larger quota",
    errno.EAGAIN: "no more processes or threads are allowed here (ulimit -u)",
    errno.EMFILE: "more files are open than this process is allowed (ulimit -n)",
    errno.ENFILE: "more files are open than this machine allows",
    errno.ENOMEM: "no memory is left",
    errno.EFBIG: "files are not allowed to grow so large here (ulimit -f)",
    errno.EIO: "the disk or the network failed",
    errno.ESTALE: "the file server has lost it",
    errno.ETIMEDOUT: "the file server does not answer",
    errno.EPIPE: "nobody reads it any more",
    errno.EBADF: "it is closed",
}
"""What is exhausted or unavailable, or what to do about it, by error number."""

_NO_THREAD = "Resource temporarily unavailable"
"""Text in the panic of a Rust library that cannot start a thread."""


@contextmanager
def doing(done: str, what: str | os.PathLike[str]) -> Iterator[None]:
    """Add to operating-system errors what was being done, and to which file.

    Args:
        done: a participle, such as "written".
        what: the file; replaces a temporary file, or none, that the error names.
    """
    try:
        yield
    except OSError as error:
        if not hasattr(error, "asyncpp_done"):
            error.filename, error.filename2 = os.fspath(what), None
            error.asyncpp_done = done  # type: ignore[attr-defined]
        raise


@contextmanager
def filling(folder: Path) -> Iterator[None]:
    """Name the folder that is being filled where a write, which names no file, finds no room."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in (*FULL, errno.EFBIG):
            with doing("written", folder):
                raise
        raise


def refusal_of(error: BaseException) -> Refusal | None:
    """Message and exit code for an error; None if it is a bug of asyncpp."""
    match error:
        case UserError() | DamagedError():
            return Refusal(str(error), WRONG)
        case TakenOverError():
            return Refusal(str(error), FAILED)
        case OSError(errno=int()):
            code = FAILED if error.errno in _ADVICE else WRONG
            return Refusal(_system_error_message(error), code)
        case _ if lacks_memory(error):
            return Refusal(f"there is not enough memory for it{_memory_limit()}", FAILED)
        case RuntimeError() if "can't start new thread" in str(error):
            stacks = (
                f", or for its stack there is not enough memory{limit}" if (limit := _memory_limit()) else ""
            )
            return Refusal(f"a thread cannot be started ({_ADVICE[errno.EAGAIN]}{stacks})", FAILED)
        case _ if type(error).__name__ == "PanicException" and _NO_THREAD in str(error):
            return Refusal(f"a thread cannot be started ({_ADVICE[errno.EAGAIN]})", FAILED)
        case RuntimeError() if "determine home directory" in str(error):
            return Refusal("the home folder is not known: set HOME to a folder", WRONG)
        case UnicodeEncodeError() if any("\ud800" <= character <= "\udfff" for character in error.object):
            return Refusal(f"{error.object!r} is not UTF-8: use another name", WRONG)
    return None


_NOT_LOADED = re.compile(
    "failed to map segment|annot allocate memory(?! in static)|cannot map zero-fill|Polars binary is missing"
)
"""What the loader of libraries says where memory is used up, and polars, which catches it."""


def lacks_memory(error: BaseException) -> bool:
    """Whether memory is used up, as Python says, or the loader of a library."""
    return any(
        isinstance(each, MemoryError) or (isinstance(each, ImportError) and _NOT_LOADED.search(str(each)))
        for each in _causes(error)
    )


def lacks_space(error: BaseException) -> bool:
    """Whether a disk is full, or a quota is used up."""
    return any(isinstance(each, OSError) and each.errno in FULL for each in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that it came from."""
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__ or each.__context__


POLARS_BYTES = 1_500_000_000
"""Address space for polars with two threads and a report's tables; where none is left, it ends the process
and prints its stack."""


def need_polars() -> None:
    """Import polars, which only warns, and fails later, where memory is too small for its library.

    Raises:
        ImportError: its library cannot be loaded.
        MemoryError: this process may not have the address space that it needs (ulimit -v).
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit >= 0:
        os.environ.setdefault("POLARS_MAX_THREADS", "2")
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        if "polars" not in sys.modules and limit - pages * resource.getpagesize() < POLARS_BYTES:
            raise MemoryError
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Polars binary is missing")
        try:
            importlib.import_module("polars")
        except UserWarning as error:
            raise ImportError(str(error)) from error


def _memory_limit() -> str:
    """The limit of this process's memory, for messages; empty without one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return f" (this process may have {limit / 1e9:.2g} GB: ulimit -v)" if limit >= 0 else ""


def exit_code_of(program: Callable[[], int]) -> int:
    """Run a program that has no command line; for an error that is no bug, prints its message.

    Returns:
        The program's exit code, or that of its error.
    """
    try:
        return program()
    except Exception as error:
        if (refusal := refusal_of(error)) is None:
            raise
        # A full disk may not even take this line.
        with suppress(OSError):
            print(refusal.message, flush=True)
        return refusal.code


def _system_error_message(error: OSError) -> str:
    reason = error.strerror or type(error).__name__
    advice = f": {_ADVICE[error.errno]}" if error.errno in _ADVICE else ""
    if error.errno == errno.ENOMEM:
        advice += _memory_limit()
    if error.filename is None:
        problem = "a process cannot be started" if error.errno == errno.EAGAIN else "the system refuses"
        return f"{problem} ({reason}{advice})"
    file = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else str(error.filename)
    done = getattr(error, "asyncpp_done", None)
    return f"{file}: {reason}{advice}" if done is None else f"{file} cannot be {done} ({reason}{advice})"
