"""Output of `asyncpp schedule`: tables and charts for display, plain data for scripts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from asyncpp_cli.base.console import console, show_line, show_table
from schedules import Analysis, Program, analyze
from schedules.io.text_gantt import LEGEND, SHARDS_LEGEND, TIED_LEGEND, Piece, gantt
from schedules.simulate import Timeline, segment_step_time
from schedules.step_time import StepTime

_PLAIN_WIDTH = 80
_TABLE_WIDTH = 120
_COLOURS = (
    "white on blue",
    "black on yellow",
    "black on green",
    "white on magenta",
    "black on cyan",
    "white on red",
    "black on white",
)


MOST_UNSETTLED = 0.01
"""Share by which the time of a step in a segment may differ from that in the long run, unsaid."""


def comparison_row(timeline: Timeline, step: StepTime) -> dict[str, Any]:
    """The row of `compare` for one schedule.

    Args:
        timeline: of a segment, simulated.
        step: of its steady state.
    """
    program = timeline.program
    analysis = analyze(program)
    return {
        "schedule": program.schedule,
        "stages": program.num_ranks,
        "chunks": (program.loss_stage + 1) // program.num_ranks,
        "microbatches": program.microbatches,
        "bubble": step.bubble,
        "step_time": step.seconds,
        "segment_steps": program.steps,
        "segment_step_time": segment_step_time(timeline),
        "delay_max": max(analysis.delay_max),
        "mismatch_max": max(analysis.mismatch_max),
        "versions_max": max(analysis.versions),
        "activations_max": activations_of_a_rank(program, analysis),
        "drain_time": max(0.0, timeline.makespan - program.steps * step.seconds),
        "busy": list(step.busy),
    }


def unsettled(row: Mapping[str, Any]) -> str:
    """What to say of a schedule whose steps take another time in its segment; empty if they do not."""
    own, step = row["segment_step_time"], row["step_time"]
    if own is None or abs(own - step) <= MOST_UNSETTLED * step:
        return ""
    segment = f"{own:.4g} in a segment of {row['segment_steps']} steps"
    return f"{row['schedule']}: a step takes {step:.4g} in the long run, {segment}"


def activations_of_a_rank(program: Program, analysis: Analysis) -> float:
    """Peak activations of a rank, in units of one micro-batch over the rank's whole share of the layers."""
    chunks = (program.loss_stage + 1) / program.num_ranks
    most = max(analysis.rank_activations) / chunks
    return int(most) if most == int(most) else most


def show_comparison(rows: list[dict[str, Any]]) -> None:
    """Print the table of `rows`, each from `comparison_row`."""
    first = rows[0]
    chunks = max(row["chunks"] for row in rows)
    title = f"{first['stages']} ranks, {first['microbatches']} micro-batches per step"
    title += f", {chunks} chunks per rank where schedules take them" if chunks > 1 else ""
    table = [
        [
            row["schedule"],
            f"{100 * row['bubble']:.1f} %",
            f"{row['step_time']:.4g}",
            str(row["delay_max"]),
            str(row["mismatch_max"]),
            str(row["versions_max"]),
            f"{row['activations_max']:g}",
            f"{row['drain_time']:.4g}",
        ]
        for row in rows
    ]
    columns = ["schedule", "bubble", "step", "delay", "mismatch", "versions", "in flight", "drain"]
    show_table(columns, table, title=title)
    for row in rows:
        if said := unsettled(row):
            show_line(said)


def described_step(row: Mapping[str, Any]) -> str:
    """The time of a step, from the row of `compare`."""
    return unsettled(row) or f"a step takes {row['step_time']:.4g}, idle for {100 * row['bubble']:.1f} %"


def described_stages(program: Program) -> str:
    """How many stages, shards of the head and ranks a program has."""
    shards = f" and {program.head_shards} shards of the head" if program.head_shards else ""
    return f"{program.loss_stage + 1} stages{shards} on {program.num_ranks} ranks"


def show_analysis(program: Program, analysis: Analysis) -> None:
    """Print the table of every stage's properties."""
    rows = []
    for stage, rank in enumerate(program.rank_of_stage):
        least, most = analysis.delay_min[stage], analysis.delay_max[stage]
        slack = analysis.slack[stage]
        rows.append(
            [
                str(stage),
                str(rank),
                f"{least}" if least == most else f"{least} to {most}",
                str(analysis.mismatch_max[stage]),
                str(analysis.versions[stage]),
                str(analysis.activations[stage]),
                "-" if slack is None else str(slack),
            ]
        )
    columns = ["stage", "rank", "delay", "mismatch", "versions", "in flight", "slack"]
    show_table(columns, rows, title="slack: micro-batches from an update to the first reader of its version")


def print_chart(timeline: Timeline) -> None:
    """Print the Gantt chart: with colours on a terminal, as plain text elsewhere."""
    terminal = out()
    width = terminal.width if terminal.is_terminal else _PLAIN_WIDTH
    for line in gantt(timeline, width=width):
        text = Text()
        for piece in line:
            text.append(piece.text, style=_style(piece))
        terminal.print(text, no_wrap=True, overflow="ignore", crop=False)
    terminal.print(Text(LEGEND, style="dim"))
    if timeline.program.head_shards:
        terminal.print(Text(SHARDS_LEGEND, style="dim"))
    if timeline.program.tied_shards:
        terminal.print(Text(TIED_LEGEND, style="dim"))


def _style(piece: Piece) -> str:
    if piece.version is None:
        return "dim" if piece.text.startswith(".") else ""
    return f"{'bold ' if piece.is_backward else ''}{_COLOURS[piece.version % len(_COLOURS)]}"


def out() -> Console:
    """Console on standard output: as wide as the terminal; elsewhere wide enough for any table."""
    return console() if sys.stdout.isatty() else console(width=_TABLE_WIDTH)
