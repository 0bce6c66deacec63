"""Where a benchmark's result is put: one file a day, whose name says what was measured and when."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path


def today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


def write_dated(folder: Path, name: str, text: str) -> Path:
    """Write `text` as `FOLDER/NAME-DATE.md` and say so; the folder is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{today()}.md"
    file.write_text(text, encoding="utf-8")
    print(f"wrote {file}", file=sys.stderr)
    return file
