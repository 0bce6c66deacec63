"""Runs the commands that people type, one after the other in this process, and writes down how each ended.

python every_command.py EXPERIMENT RESULTS (full | closed | few | plain)
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def commands(folder: Path) -> list[list[str]]:
    """The commands; some of them write below `folder`, which holds an experiment `e`."""
    experiment, new = str(folder / "e"), str(folder / "new")
    done = str(folder / "e" / "runs" / "run-0")
    return [
        ["--version"],
        ["templates", "list"],
        ["templates", "show", "quickstart"],
        ["schedule", "list", "--stages", "2", "--microbatches", "4"],
        ["schedule", "show", "2bw", "--stages", "2", "--microbatches", "4"],
        ["schedule", "export", "2bw", "--stages", "2", "--microbatches", "4", "--out", f"{new}.program"],
        ["optimizers", "list"],
        ["theory", "stability"],
        ["plan", "quickstart"],
        ["sweep", "quickstart", "--list"],
        ["sweep", "quickstart", "--out", new],
        ["status", experiment],
        ["status", experiment, "--json"],
        ["logs", experiment, "run-0"],
        ["report", experiment],
        ["report", experiment, "--format", "csv"],
        ["report", experiment, "--format", "html", "--out", f"{new}.html"],
        ["cancel", experiment],
        ["launch", experiment],
        ["retry", experiment, "run-1"],
        ["retry", experiment, "--failed"],
        ["mirror", experiment, "--to", "tensorboard"],
        ["data", "prepare", str(folder / "text.txt"), "--tokenizer", "bytes", "--out", f"{new}-data"],
        ["data", "inspect", f"{new}-data"],
        ["train", done],
        ["export", done, "--out", f"{new}-weights"],
        ["no-such-command"],
        ["status", str(folder / ("x" * 300))],
    ]


def main(folder: Path, results: Path, kind: str) -> None:
    """Run them all; if the disk is to be full, it is filled first."""
    import asyncpp_cli.main as command_line

    if kind == "full":
        with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
    ends: list[dict[str, Any]] = []
    out, err = results / "out", results / "err"
    for arguments in commands(folder):
        if kind == "few" and arguments[0] == "report":
            continue  # polars ends in a panic of its own where it can start no thread
        for number, file in ((1, out), (2, err)):
            opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(opened, number)
            os.close(opened)
        if kind == "closed":
            os.close(1)
        sys.argv = ["asyncpp", *arguments]
        code: object = 0
        fault = ""
        try:
            command_line.main()
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            fault = traceback.format_exc()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        errors = err.read_text(errors="replace")
        ends.append({"arguments": arguments, "code": code or 0, "errors": errors, "fault": fault})
        (results / "ends.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
