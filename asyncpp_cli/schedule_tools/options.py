"""The options that several commands of `asyncpp schedule` share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from asyncpp_cli.base.console import finite, to_write


def _schedule_words(incomplete: str) -> list[str]:
    """Names of schedules, for the shell's completion."""
    from schedules import NAMES

    return [name for name in NAMES if name.startswith(incomplete)]


Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Schedule (see `list`) or program file.",
        autocompletion=_schedule_words,
    ),
]
Names = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME...", help="Schedules (see `list`) or files.", autocompletion=_schedule_words
    ),
]
Stages = Annotated[int | None, typer.Option(metavar="P", min=1, help="Pipeline ranks.")]
Microbatches = Annotated[int | None, typer.Option(metavar="M", min=1, help="Micro-batches per step.")]
Chunks = Annotated[
    int | None,
    typer.Option(metavar="V", min=1, help="Stages per rank (interleaved-1f1b, looped-bfs; default: 2)."),
]
Steps = Annotated[int, typer.Option(metavar="N", min=1, help="Steps to show.")]
SegmentSteps = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Steps of the segment (default: the fewest with a steady middle)."),
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON to standard output.")]
ShardHead = Annotated[
    bool, typer.Option("--shard-head", help="With the head in shards on all ranks (S and T).")
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write to FILE (default: standard output).", callback=to_write),
]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Arguments that a built-in schedule is built with."""

    stages: Stages = None
    microbatches: Microbatches = None
    chunks: Chunks = None
    ahead: Annotated[
        int | None,
        typer.Option(metavar="A", help="2bw, 2bw-v, paci-v: room for late messages (default: 1)."),
    ] = None
    split: Annotated[
        bool | None, typer.Option("--split", help="2bw-v with split backwards: fewer activations.")
    ] = None
    delay: Annotated[
        int | None,
        typer.Option(metavar="D", max=1_000, help="Delay of 2bw and 2bw-v (default: the smallest possible)."),
    ] = None
    update_interval: Annotated[
        int | None,
        typer.Option(metavar="A", help="Backwards per update (default: pipedream 1; paci, paci-v M)."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Times:
    """Times of computing, in one unit, for a rank's whole share of the model."""

    forward: Annotated[float, typer.Option(parser=finite, metavar="T", help="Time of a forward.")] = 1.0
    input_half: Annotated[
        float,
        typer.Option("--input", parser=finite, metavar="T", help="Time of the input half of a backward."),
    ] = 1.0
    weight_half: Annotated[
        float, typer.Option("--weight", parser=finite, metavar="T", help="Time of its weight half.")
    ] = 1.0


@dataclass(frozen=True, kw_only=True)
class AllTimes(Times):
    """Also the times of messages and updates."""

    latency: Annotated[
        float, typer.Option(parser=finite, metavar="T", help="Latency of a message between stages.")
    ] = 0.0
    update: Annotated[float, typer.Option(parser=finite, metavar="T", help="Time of an optimizer step.")] = (
        0.0
    )
    reduction: Annotated[
        float,
        typer.Option(parser=finite, metavar="T", help="Time of the data-parallel gradient all-reduce."),
    ] = 0.0
