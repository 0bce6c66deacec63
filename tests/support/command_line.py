"""The command line, run in the test's process or in one of its own."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from asyncpp_cli.main import main


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a command."""

    code: int
    output: str
    errors: str


ASYNCPP = (sys.executable, "-P", "-m", "asyncpp_cli")
"""`asyncpp` as a program; -P, as in the console script: it imports nothing from the working folder."""


def ran(*command: str | Path, **options: Any) -> Ended:
    """Run a program to its end, whatever its exit code."""
    done = subprocess.run(
        command, capture_output=True, text=True, errors="surrogateescape", check=False, **options
    )
    return Ended(done.returncode, done.stdout, done.stderr)


class Terminal(io.StringIO):
    """Standard input that a person types."""

    def isatty(self) -> bool:
        return True


def asyncpp(*arguments: str | Path) -> Ended:
    """Run `asyncpp` with these arguments."""
    output, errors = io.StringIO(), io.StringIO()
    code: object = 0
    with (
        patch.object(sys, "argv", ["asyncpp", *map(str, arguments)]),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int | None)
    return Ended(code or 0, output.getvalue(), errors.getvalue())


def succeeded(*arguments: str | Path) -> Ended:
    """Run `asyncpp` with these arguments, which must succeed."""
    ended = asyncpp(*arguments)
    assert ended.code == 0, ended
    return ended


def refusal(*arguments: str | Path, remarks: int = 0) -> str:
    """What a command says that must be refused: its error in one line, after so many lines of remarks."""
    ended = asyncpp(*arguments)
    assert (ended.code, ended.output, ended.errors.count("\n")) == (2, "", 1 + remarks), ended
    assert ended.errors.splitlines()[-1].startswith("asyncpp: error: ")
    return ended.errors
