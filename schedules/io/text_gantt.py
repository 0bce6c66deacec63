"""A timeline as lines of text: a row per rank, a box per action, cut into blocks that fit the width.

A box begins with its action as it prints (the stage left out where a rank has one), so the version read can
be seen without colours; with them, the version is the colour. `U4` or `|` at the end of a box: the update
that follows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedules.actions import Action, Op
from schedules.simulate import Timeline


@dataclass(frozen=True)
class Piece:
    """A part of a line: its text, and the version that it is coloured by."""

    text: str
    version: int | None = None
    is_backward: bool = False


LEGEND = "F forward  B backward  I, W its halves  @ version read  U version written"
SHARDS_LEGEND = "S, T shards of the head: logits and input gradient, weight gradient"
TIED_LEGEND = "E, G of a tied one, look-up and its gradient, take no time here; --json has them"


def gantt(timeline: Timeline, *, width: int = 80) -> list[list[Piece]]:
    """The lines of a Gantt chart.

    Args:
        timeline: What to show.
        width: Columns that a line may take.
    """
    label = max(len(f"rank {rank} ") for rank in range(timeline.program.num_ranks))
    unit, scale = _scale(timeline)
    rows = [_row(timeline, rank, scale) for rank in range(timeline.program.num_ranks)]
    columns = max(sum(len(piece.text) for piece in row) for row in rows)
    block = max(unit, (width - label) // unit * unit)
    lines: list[list[Piece]] = []
    for begin in range(0, columns, block):
        end = min(begin + block, columns)
        lines.append([Piece(f"{'time':{label}}{begin / scale:g} to {end / scale:g}")])
        for rank, row in enumerate(rows):
            lines.append([Piece(f"rank {rank}".ljust(label)), *_cut(row, begin, end)])
        lines.append([Piece("")])
    return lines[:-1]


def _scale(timeline: Timeline) -> tuple[int, float]:
    """Columns of the box of a typical shortest action, which holds any label, and columns a unit of time."""
    durations: dict[Op, list[float]] = {}
    longest = 0
    for actions, starts, ends in zip(timeline.program.actions, timeline.starts, timeline.ends, strict=True):
        for action, start, end in zip(actions, starts, ends, strict=True):
            if action.op is not Op.UPDATE:
                durations.setdefault(action.op, []).append(end - start)
                longest = max(longest, len(_label(timeline, action)))
    typical = [sorted(of_op)[len(of_op) // 2] for of_op in durations.values()]
    shortest = min((time for time in typical if time > 0), default=1.0)
    return longest + 1, (longest + 1) / shortest


def _label(timeline: Timeline, action: Action) -> str:
    one_stage_a_rank = timeline.program.num_stages == timeline.program.num_ranks
    return str(action).removeprefix(str(action.stage)) if one_stage_a_rank else str(action)


def _row(timeline: Timeline, rank: int, scale: float) -> list[Piece]:
    timed = sorted(
        zip(timeline.starts[rank], timeline.ends[rank], timeline.program.actions[rank], strict=True),
        key=lambda entry: entry[:2],
    )
    row: list[Piece] = []
    column = 0
    for start, end, action in timed:
        begin, until = max(column, round(start * scale)), round(end * scale)
        label = _label(timeline, action)
        if action.op is Op.UPDATE and until <= begin:
            if row:
                row[-1] = _with_update(row[-1], label)
            continue
        if begin > column:
            row.append(Piece("." * (begin - column)))
        size = max(until - begin, 0)
        row.append(
            Piece(
                label[: max(size - 1, 0)].ljust(size),
                version=action.version,
                is_backward=action.op not in (Op.FORWARD, Op.UPDATE),
            )
        )
        column = begin + size
    return row


def _with_update(piece: Piece, label: str) -> Piece:
    """`piece` with the update that follows it at its end, as far as there is room."""
    text = piece.text.rstrip()
    room = len(piece.text) - len(text)
    mark = label if room > len(label) + 1 else "|"
    end = f"{mark} " if mark == label else mark
    return Piece(piece.text[: len(piece.text) - len(end)] + end, piece.version, piece.is_backward)


def _cut(row: list[Piece], begin: int, end: int) -> list[Piece]:
    """The part of `row` from column `begin` to column `end`."""
    parts = []
    column = 0
    for piece in row:
        text = piece.text[max(begin - column, 0) : max(end - column, 0)]
        if text:
            parts.append(Piece(text, piece.version, piece.is_backward))
        column += len(piece.text)
    return parts
