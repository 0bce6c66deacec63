"""Runs commands on terminals of several widths: python at_widths.py COMMANDS RESULTS."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from support.every_command import on_terminal

import asyncpp_cli.main as command_line
from stages.config.torch_process import leave


def main(commands: list[tuple[list[str], list[int]]], results: Path) -> None:
    """Write a list of what each command printed at each of its widths, as JSON."""
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)
    os.environ |= {"TERM": "xterm", "NO_COLOR": "1"}
    printed: list[dict[int, str]] = []
    text = results.with_suffix(".txt")
    for command, widths in commands:
        printed.append({})
        for width in widths:
            sys.argv = ["asyncpp", *command]
            with on_terminal(1, text, columns=width):
                with contextlib.suppress(SystemExit):
                    command_line.main()
                sys.stdout.flush()
            printed[-1][width] = text.read_text()
    results.write_text(json.dumps(printed))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
    leave(0)
