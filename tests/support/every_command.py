"""Runs every command of the command line in this process, and records how each ended.

python every_command.py (EXPERIMENT RESULTS KIND)...
python every_command.py --widths COMMANDS RESULTS

KIND is plain, closed, few, full or read-only. Several kinds share one process and what it imports;
after `closed` there is no standard output any more. With --widths the given commands run, each on terminals
of several widths.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import struct
import sys
import termios
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.config.torch_process import leave


def commands(folder: Path, *, kind: str) -> list[list[str]]:
    """The command lines; some write below `folder`, which holds the experiments `e` and `c`.

    Args:
        folder: the folder.
        kind: the environment. Launches that would train are left out.
    """
    # Where `quickstart` would train, its folder is a file.
    quick = str(folder / ("quick" if kind in ("few", "full", "read-only") else "text.txt"))
    launches: list[list[str]] = []
    if kind in ("few", "full", "read-only"):
        launches.append(["launch", str(folder / "c")])
    if kind in ("full", "read-only"):
        launches.append(["train", str(folder / "c" / "runs" / "run-0"), "--replay"])
    if kind in ("plain", "few"):  # its two processes with torch take seconds
        launches.append(["doctor", "--dir", str(folder)])
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
        ["diff", experiment, done],
        ["remove", experiment, "run-0"],
        ["extend", experiment, "run-0", "--steps", "9", "--out", f"{new}-longer"],
        ["cancel", experiment],
        ["launch", experiment],
        ["launch", f"{experiment}/run-1"],
        ["launch", experiment, "--failed"],
        ["mirror", experiment, "--to", "tensorboard"],
        ["data", "prepare", str(folder / "text.txt"), "--tokenizer", "bytes", "--out", f"{new}-data"],
        ["data", "inspect", f"{new}-data"],
        ["train", done],
        ["export", done, "--out", f"{new}-weights"],
        ["quickstart", "--out", quick],
        ["plan", "micro", "data.context=16", "--repeats", "1", "--measure", f"{new}.profile"],
        *launches,
        ["no-such-command"],
        ["status", str(folder / ("x" * 300))],
    ]


@contextmanager
def in_file(number: int, file: Path) -> Iterator[None]:
    """Redirect a file descriptor of this process to a file."""
    opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(opened, number)
    os.close(opened)
    yield


@contextmanager
def on_terminal(number: int, file: Path, *, columns: int = 80) -> Iterator[None]:
    """Redirect a file descriptor to a terminal of that many columns, and write its output to a file."""
    output, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    end_mark = b"\0over\0"
    text = bytearray()

    def read_output() -> None:
        while not text.endswith(end_mark):
            text.extend(os.read(output, 4096))

    reader = threading.Thread(target=read_output)
    reader.start()
    os.dup2(terminal, number)
    try:
        yield
    finally:
        os.write(terminal, end_mark)
        reader.join()
        os.close(terminal)
        file.write_bytes(text.removesuffix(end_mark).replace(b"\r\n", b"\n"))


def main(folder: Path, results: Path, kind: str) -> None:
    """Run all commands; the environment `full` fills the disk first."""
    import asyncpp_cli.main as command_line

    if kind == "full":
        with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
    ends: list[dict[str, Any]] = []
    out, err = results / "out", results / "err"
    for arguments in commands(folder, kind=kind):
        sys.argv = ["asyncpp", *arguments]
        code: object = 0
        fault = ""
        with in_file(1, out), in_file(2, err):
            if kind == "closed":
                os.close(1)
            try:
                command_line.main()
            except SystemExit as ended:
                code = ended.code
            except BaseException:
                fault = traceback.format_exc()
            with contextlib.suppress(OSError):
                sys.stdout.flush()
        end = {"arguments": arguments, "code": code or 0, "fault": fault}
        end |= {"output": out.read_text(errors="replace"), "errors": err.read_text(errors="replace")}
        ends.append(end)
        (results / "ends.json").write_text(json.dumps(ends))


def at_widths(commands: list[tuple[list[str], list[int]]], results: Path) -> None:
    """Write a list of what each command printed at each of its widths, as JSON."""
    import asyncpp_cli.main as command_line

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
    words = sys.argv[1:]
    if words[0] == "--widths":
        at_widths(json.loads(words[1]), Path(words[2]))
        leave(0)
    for experiment, outcome, environment in zip(words[::3], words[1::3], words[2::3], strict=True):
        main(Path(experiment), Path(outcome), environment)
    leave(0)
