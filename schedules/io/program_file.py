"""Program files: programs as text, with a small header and one line of actions for each rank.

    asyncpp program, format 1
    schedule: 2bw
    microbatches: 2
    update_interval: 2
    steps: 1
    first_step: 0
    rank_of_stage: 0 1
    initial_versions: 0
    final_versions: 0 1
    rank 0: 0F0@0 0F1@0 0B0@0 0B1@0 0U1
    rank 1: 1F0@0 1B0@0 1F1@0 1B1@0 1U1

Empty lines are ignored, and so is text after a `#`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from schedules.actions import Action, Program, ScheduleError, parse_action

FIRST_LINE = "asyncpp program, format 1"
_NUMBERS = ("microbatches", "update_interval", "steps", "first_step")
_LISTS = ("rank_of_stage", "initial_versions", "final_versions")
_KEYS = ("schedule", *_NUMBERS, *_LISTS)
_OPTIONAL_KEYS = ("updates_together", "head_shards", "tied_shards")
_RANK_LINE = re.compile(r"rank +(\d{1,9})")


def to_text(program: Program) -> str:
    """`program` as the text of a file."""
    lines = [
        FIRST_LINE,
        f"schedule: {program.schedule}",
        *(f"{key}: {getattr(program, key)}" for key in _NUMBERS),
        *(f"{key}: {' '.join(map(str, getattr(program, key)))}" for key in _LISTS),
    ]
    if not program.updates_together and program.update_interval == program.microbatches:
        lines.append("updates_together: 0")
    if program.head_shards:
        lines.append(f"head_shards: {program.head_shards}")
    if program.tied_shards:
        lines.append("tied_shards: 1")
    for rank, actions in enumerate(program.actions):
        lines.append(f"rank {rank}: {' '.join(map(str, actions))}")
    return "\n".join(lines) + "\n"


def from_text(text: str, *, file: str) -> Program:
    """The program that `text` describes, not yet verified (see `verify`).

    Args:
        text: Content of a program file.
        file: Name of the file in errors.

    Raises:
        ScheduleError: The text is not a program; the message names the file and the line.
    """
    header: dict[str, tuple[str, str]] = {}
    ranks: list[tuple[Action, ...]] = []
    started = False
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{file}, line {number}"
        content = line.partition("#")[0].strip()
        if not content:
            continue
        if not started:
            if content != FIRST_LINE:
                raise ScheduleError(f"{where}: a program begins with the line {FIRST_LINE!r}")
            started = True
            continue
        key, colon, value = (part.strip() for part in content.partition(":"))
        rank_line = _RANK_LINE.fullmatch(key)
        if not colon or not (rank_line or key in (*_KEYS, *_OPTIONAL_KEYS)):
            accepted = ", ".join((*_KEYS, *_OPTIONAL_KEYS))
            raise ScheduleError(f"{where}: expected 'rank R: ACTIONS' or 'KEY: VALUE', KEY one of {accepted}")
        if rank_line:
            if int(rank_line[1]) != len(ranks):
                raise ScheduleError(
                    f"{where}: the line of rank {len(ranks)} is due, and this is rank {rank_line[1]}"
                )
            ranks.append(_parse_actions(value, where=where))
        elif key in header:
            raise ScheduleError(f"{where}: {key} is given twice")
        else:
            header[key] = (value, where)
    if not started:
        raise ScheduleError(f"{file}: empty; a program begins with the line {FIRST_LINE!r}")
    for key in _KEYS:
        if key not in header:
            raise ScheduleError(f"{file}: the line '{key}: ...' is missing")
    # Left out, it follows from the update interval: stages that update more often do so on their own.
    default = _number(header, "update_interval") == _number(header, "microbatches")
    together = bool(_number(header, "updates_together")) if "updates_together" in header else default
    numbers: dict[str, Any] = {key: _number(header, key) for key in _NUMBERS}
    numbers |= {key: _numbers(header, key) for key in _LISTS}
    return Program(
        schedule=header["schedule"][0],
        **numbers,
        actions=tuple(ranks),
        head_shards=_number(header, "head_shards") if "head_shards" in header else 0,
        tied_shards="tied_shards" in header and bool(_number(header, "tied_shards")),
        updates_together=together,
    )


def _parse_actions(value: str, *, where: str) -> tuple[Action, ...]:
    actions = []
    for place, word in enumerate(value.split()):
        try:
            actions.append(parse_action(word))
        except ValueError as error:
            raise ScheduleError(f"{where}, action {place}: {error}") from None
    return tuple(actions)


def _numbers(header: Mapping[str, tuple[str, str]], key: str) -> tuple[int, ...]:
    value, where = header[key]
    if not re.fullmatch(r"\d{1,15}( +\d{1,15})*", value):
        raise ScheduleError(f"{where}: {key} takes whole numbers of 0 or more, not {value[:60]!r}")
    return tuple(int(word) for word in value.split())


def _number(header: Mapping[str, tuple[str, str]], key: str) -> int:
    numbers = _numbers(header, key)
    if len(numbers) != 1:
        raise ScheduleError(f"{header[key][1]}: {key} takes one whole number, not {len(numbers)}")
    return numbers[0]
