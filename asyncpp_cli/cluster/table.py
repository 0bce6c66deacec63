"""What the tasks of an array read when they begin: which runs, how, and with what."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncpp_cli.cluster.shapes import Shape
from asyncpp_cli.files import read_json, write_json
from asyncpp_cli.runs import FORMAT


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run of the array."""

    id: str
    config_sha256: str
    steps: int


@dataclass(frozen=True, kw_only=True)
class ArrayTable:
    """The content of array-K.json."""

    name: str
    """Of the job."""
    submission: str
    cluster: str
    replay: bool
    retries: int
    signal_lead: int
    network_interface: str | None
    srun_flags: list[str]
    site_settings: dict[str, Any]
    code: str
    """`snapshot.code_hash` of the code that is to run."""
    software: dict[str, str]
    shape: Shape
    rows: list[Row]
    """By array index."""
    exclude: str = ""
    """Nodes that the site's profile excludes."""


def write_table(file: Path, table: ArrayTable) -> None:
    """Write array-K.json."""
    write_json(file, {"format": FORMAT} | asdict(table))


def read_table(file: Path) -> ArrayTable:
    """The table in a file.

    Raises:
        DamagedError: it is none.
    """
    content = read_json(file, newest_format=FORMAT)
    content.pop("format")
    shape = Shape(**content.pop("shape"))
    rows = [Row(**row) for row in content.pop("rows")]
    return ArrayTable(shape=shape, rows=rows, **content)
