"""What goes wrong by a user's hand or the system's, as opposed to ours: how it is told, and the exit code.

| what | exit code |
|---|---|
| a mistake of the user's; a file that the system refuses to read, write or make | 2 |
| the system has run short of something, or an output is closed: the same command may succeed later | 1 |
| a fault of asyncpp's: a traceback, and where to report it | 1 |

All codes of the commands are in docs/index.md.
"""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

WRONG = 2
"""Exit code where the command must be changed, or what it works on."""

FAILED = 1
"""Exit code where the same command may succeed another time, and where runs have failed."""


class UserError(Exception):
    """A mistake of the user's: one line on standard error, exit code 2."""


class DamagedError(Exception):
    """A file of a run that cannot be read: truncated, of another form, or of a newer asyncpp."""


@dataclass(frozen=True)
class Refusal:
    """What is told of an error that is no fault of ours."""

    message: str
    code: int


_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or ask for a larger quota",
    errno.EAGAIN: "no more processes or threads are allowed here (ulimit -u)",
    errno.EMFILE: "more files are open than this process is allowed (ulimit -n)",
    errno.ENFILE: "more files are open than this machine allows",
    errno.ENOMEM: "the machine has no memory left",
    errno.EFBIG: "files are not allowed to grow so large here (ulimit -f)",
    errno.EIO: "the disk or the network failed",
    errno.ESTALE: "the file server has lost it",
    errno.ETIMEDOUT: "the file server does not answer",
    errno.EPIPE: "nobody reads it any more",
    errno.EBADF: "it is closed",
}
"""What the system runs short of, and what to do."""

_NO_THREAD = "Resource temporarily unavailable"
"""A panic of a library in Rust says so."""

_DONE = {
    "read_text": "read",
    "read_bytes": "read",
    "write_text": "written",
    "write_bytes": "written",
    "_mkstemp_inner": "written",
    "mkdtemp": "made",
    "mkdir": "made",
    "makedirs": "made",
    "iterdir": "listed",
    "scandir": "listed",
    "glob": "listed",
    "rename": "renamed",
    "replace": "replaced",
    "unlink": "removed",
    "rmdir": "removed",
    "chmod": "changed",
    "stat": "looked at",
    "exists": "looked at",
    "is_file": "looked at",
    "is_dir": "looked at",
    "_execute_child": "started",
    "fork": "started",
}
"""What a function of Python's library does to a file, by the function's name."""


@contextmanager
def doing(done: str, what: str | os.PathLike[str]) -> Iterator[None]:
    """Say of errors of the operating system what was being done, and to which file.

    Args:
        done: a participle: "written".
        what: the file; it takes the place of a temporary one, or of none, that the system names.
    """
    try:
        yield
    except OSError as error:
        if not hasattr(error, "asyncpp_done"):
            error.filename, error.filename2 = os.fspath(what), None
            error.asyncpp_done = done  # type: ignore[attr-defined]
        raise


def refusal_of(error: BaseException) -> Refusal | None:
    """What to tell of an error; None where it is a fault of ours."""
    match error:
        case UserError() | DamagedError():
            return Refusal(str(error), WRONG)
        case OSError(errno=int()):
            code = FAILED if error.errno in _ADVICE else WRONG
            return Refusal(_told(error), code)
        case MemoryError():
            return Refusal("there is not enough memory for it on this machine", FAILED)
        case RuntimeError() if "can't start new thread" in str(error):
            return Refusal(f"a thread cannot be started ({_ADVICE[errno.EAGAIN]})", FAILED)
        case _ if type(error).__name__ == "PanicException" and _NO_THREAD in str(error):
            return Refusal(f"a thread cannot be started ({_ADVICE[errno.EAGAIN]})", FAILED)
        case RuntimeError() if "determine home directory" in str(error):
            return Refusal("there is no home folder here: set HOME to a folder", WRONG)
        case UnicodeEncodeError() if any("\ud800" <= character <= "\udfff" for character in error.object):
            return Refusal(f"{error.object!r} is not UTF-8: use another name", WRONG)
    return None


def _told(error: OSError) -> str:
    reason = error.strerror or type(error).__name__
    advice = f": {_ADVICE[error.errno]}" if error.errno in _ADVICE else ""
    if error.filename is None:
        doing_what = "a process cannot be started" if error.errno == errno.EAGAIN else "the system refuses"
        return f"{doing_what} ({reason}{advice})"
    file = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else str(error.filename)
    return f"{file} cannot be {_done(error)} ({reason}{advice})"


def _done(error: OSError) -> str:
    """What was being done, as `doing` says or as the functions do that were called."""
    if (said := getattr(error, "asyncpp_done", None)) is not None:
        return str(said)
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return next((_DONE[name] for name in reversed(names) if name in _DONE), "opened")
