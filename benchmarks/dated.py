"""Where a benchmark's result is put: one file a day, whose name says what was measured and when."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

import yaml

from asyncpp_cli.version import commit


def today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


def write_dated(folder: Path, name: str, text: str) -> Path:
    """Write `text` as `FOLDER/NAME-DATE.md` and say so; the folder is made if it is not there.

    It begins with the conditions known here; benchmarks/results/README.md says how to add the rest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{today()}.md"
    conditions = {
        "date": today(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": f"Python {platform.python_version()}",
        "commit": commit() or "",
        "command": shlex.join(["python", *sys.argv]),
        "seeds": "",
        "data": "this page",
    }
    front = yaml.safe_dump(conditions, sort_keys=False, width=120)
    file.write_text(f"---\n{front}---\n\n{text}", encoding="utf-8")
    print(f"wrote {file}", file=sys.stderr)
    return file
