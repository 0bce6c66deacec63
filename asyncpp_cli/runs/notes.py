"""Notes and tags of a run, which people add.

EXPERIMENT/runs/ID/notes.jsonl   append-only: each note with its time, author, text and tags
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from msgspec import structs

from asyncpp_cli.atomic_files import append_line
from asyncpp_cli.errors import UserError
from asyncpp_cli.plain_text import printable
from asyncpp_cli.runs.processes import user_name
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import Time
from stages.records import DamagedError, Record, decoded, encoded

FILE = "notes.jsonl"
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_LONGEST = 4000
"""Characters of a note."""


class Note(Record, frozen=True, kw_only=True):
    """A note of a run."""

    time: Time
    by: str
    text: str
    """Empty if only tags were added."""
    tags: tuple[str, ...] = ()


def add_note(run: Run, text: str, *, tags: Sequence[str]) -> Note:
    """Append a note to a run.

    Raises:
        UserError: it has neither text nor tags, or one of them is not accepted; nothing is written.
    """
    for tag in tags:
        if not _TAG.fullmatch(tag):
            raise UserError(
                f"--tag {tag!r}: accepted: up to 40 letters, digits, dots, dashes and underscores"
            )
    text = text.strip()
    if not text and not tags:
        raise UserError("the note is empty; accepted: a text, --tag NAME, or both")
    if len(text) > _LONGEST:
        raise UserError(f"the note has {len(text):,} characters; accepted: up to {_LONGEST:,}")
    note = Note(time=time.time(), by=user_name(), text=text, tags=tuple(dict.fromkeys(tags)))
    append_line(run.folder / FILE, encoded(note).decode().rstrip())
    return note


def notes_of(run: Run) -> list[Note]:
    """The notes of a run, oldest first; lines that are not notes are left out."""
    try:
        text = (run.folder / FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    notes = []
    for line in text.splitlines():
        with suppress(DamagedError):
            note = decoded(line, Note, where=FILE)
            tags = tuple(map(printable, note.tags))
            notes.append(structs.replace(note, by=printable(note.by), tags=tags))
    return notes


def tags_of(notes: Iterable[Note]) -> list[str]:
    """The tags of notes, each once."""
    return list(dict.fromkeys(tag for note in notes for tag in note.tags))
