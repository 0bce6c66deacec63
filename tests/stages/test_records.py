"""The codec of JSON records: what it accepts, and its one error, which names file and key."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import pytest
from msgspec import field
from support.files import ROOT

from stages.config.records import (
    Count,
    DamagedError,
    FileRecord,
    Meta,
    Record,
    decoded,
    encoded,
    read_bytes,
    read_record,
)


class State(StrEnum):
    RUNNING = "running"
    FAILED = "failed"


class Cell(Record, frozen=True, kw_only=True):
    id: Annotated[str, Meta(pattern="^[a-z]+$", description="lower-case letters")]
    axes: dict[str, int | None] = field(default_factory=dict)
    state: State | None = None


class Experiment(FileRecord, frozen=True, kw_only=True):
    cells: tuple[Cell, ...]
    loss: float = 0.0
    steps: Count = 0


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = Experiment(cells=(Cell(id="a", axes={"x": None}, state=State.FAILED),), loss=math.inf, steps=7)
    (tmp_path / "file").write_bytes(encoded(record))
    assert read_record(tmp_path / "file", Experiment) == record
    assert math.isnan(decoded('{"cells": [], "loss": NaN, "later": 1}', Experiment, where="file").loss)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "file: cells is missing; accepted: a list"),
        ("[]", "file: the file is not accepted; accepted: a mapping with cells"),
        ('{"cells": [{"id": "a"}, {}]}', "file: cells[1].id is missing; accepted: lower-case letters"),
        ('{"cells": [{"id": "../a"}]}', 'file: cells[0].id is "../a"; accepted: lower-case letters'),
        (
            '{"cells": [{"id": "a", "state": "x"}]}',
            'file: cells[0].state is "x"; accepted: running, failed or null',
        ),
        (
            '{"cells": [{"id": "a", "axes": {"k": "v"}}]}',
            "file: cells[0].axes[...] is not accepted; accepted: a whole number or null",
        ),
        (
            '{"cells": [], "steps": -1}',
            "file: steps is -1; accepted: a whole number >= 0 and <= 9007199254740992",
        ),
        (
            '{"cells": [], "steps": true}',
            "file: steps is true; accepted: a whole number >= 0 and <= 9007199254740992",
        ),
        ('{"cells": [], "loss": "1"}', 'file: loss is "1"; accepted: a number'),
        ('{"cells": [], "format": 2}', "file has format 2: a newer asyncpp wrote it"),
    ],
)
def test_a_refusal_names_file_key_and_what_is_accepted(text: str, message: str) -> None:
    with pytest.raises(DamagedError) as refused:
        decoded(text, Experiment, where="file")
    assert str(refused.value) == message


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, '{"cells": [], "loss": 1' + 400 * "0" + "}", "\0", "1" * 5000]
)
def test_what_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(DamagedError, match=r"^file(:| is)"):
        decoded(text, Experiment, where="file")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "large", "link", "loop"])
def test_endless_and_odd_files_are_refused_and_not_read(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "file"
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "device":
            file = Path("/dev/zero")
        case "folder":
            file.mkdir()
        case "large":
            with file.open("wb") as opened:
                opened.truncate(1 << 40)
        case "link":
            file.symlink_to(tmp_path / "other")
            (tmp_path / "other").write_text("{}")
        case "loop":
            file.symlink_to(file)
    with pytest.raises(DamagedError, match=str(file)):
        read_bytes(file, follow_links=kind != "link")


def test_a_missing_file_is_not_a_damaged_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    for missing in (tmp_path / "none", tmp_path / "file" / "none"):
        with pytest.raises(FileNotFoundError):
            read_record(missing, Experiment)


def test_the_codec_imports_no_torch() -> None:
    program = "import sys, stages.config.records; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


THREADS = """
import sys, threading
import msgspec
from stages.config.records import converted
sys.setswitchinterval(1e-7)
for number in range(300):
    inner = msgspec.defstruct(f"Inner{number}", [(f"a{key}", int, 0) for key in range(20)])
    fields = [(f"f{key}", "dict[str, list[int]] | None", None) for key in range(30)]
    kind = msgspec.defstruct(f"Outer{number}", [*fields, ("inner", inner | None, None)], module=__name__)
    start = threading.Barrier(4)
    def convert():
        start.wait()
        converted({"inner": {"a3": 1}, "f1": {"a": [1]}}, kind, where="here")
    threads = [threading.Thread(target=convert) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def test_threads_may_read_the_first_records_of_a_type_at_once() -> None:
    subprocess.run([sys.executable, "-c", THREADS], check=True, timeout=60, cwd=ROOT)


def test_a_file_without_a_size_is_read_to_its_end() -> None:
    """As those of /proc, and one that grows while it is read."""
    file = Path("/proc/self/status")
    assert file.stat().st_size == 0
    assert b"Name:" in read_bytes(file)
    with pytest.raises(DamagedError, match="larger than 10 bytes"):
        read_bytes(file, most=10)
