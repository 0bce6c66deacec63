"""The options that several commands of `asyncpp schedule` share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from asyncpp_cli.base.console import finite


def _schedule_words(incomplete: str) -> list[str]:
    """Names of schedules, for the shell's completion."""
    from schedules import NAMES

    return [name for name in NAMES if name.startswith(incomplete)]


Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Schedule (see `list`), program file or CSV file.",
        autocompletion=_schedule_words,
    ),
]
Names = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME...", help="Schedules (see `list`) or files.", autocompletion=_schedule_words
    ),
]
Stages = Annotated[int | None, typer.Option(metavar="P", help="Pipeline ranks.")]
Microbatches = Annotated[int | None, typer.Option(metavar="M", help="Micro-batches per step.")]
Chunks = Annotated[
    int | None,
    typer.Option(metavar="V", help="Stages per rank (interleaved-1f1b, looped-bfs; default: 2)."),
]
Delay = Annotated[
    int | None,
    typer.Option(metavar="D", max=1_000, help="Delay of 2bw and 2bw-v (default: the smallest possible)."),
]
Ahead = Annotated[
    int | None,
    typer.Option(metavar="A", help="2bw, 2bw-v, paci-v: room for late messages (default: 1)."),
]
Split = Annotated[bool | None, typer.Option("--split", help="2bw-v with split backwards: fewer activations.")]
ShardHead = Annotated[
    bool | None, typer.Option("--shard-head", help="With the head in shards on all ranks (S and T).")
]
Tied = Annotated[
    bool | None, typer.Option("--tied", help="With --shard-head: the embedding in the same shards.")
]
Interval = Annotated[
    int | None,
    typer.Option(metavar="A", help="Backwards per update (default: pipedream 1; paci, paci-v M)."),
]
Steps = Annotated[int, typer.Option(metavar="N", min=1, help="Steps to show.")]
EvenSteps = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Steps to simulate (default: as many as needed)."),
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON to standard output.")]
Forward = Annotated[float, typer.Option(parser=finite, metavar="T", help="Time of a forward.")]
Backward = Annotated[float, typer.Option(parser=finite, metavar="T", help="Time of a whole backward.")]
Input = Annotated[
    float | None,
    typer.Option(
        "--input", parser=finite, metavar="T", help="Its input half; with --weight, instead of --backward."
    ),
]
Weight = Annotated[
    float | None, typer.Option("--weight", parser=finite, metavar="T", help="Its weight half.")
]
UpdateTime = Annotated[float, typer.Option(parser=finite, metavar="T", help="Time of an optimizer step.")]
Reduction = Annotated[
    float,
    typer.Option(parser=finite, metavar="T", help="Time of the data-parallel gradient all-reduce."),
]
Norm = Annotated[
    float, typer.Option(parser=finite, metavar="T", help="Time of the global gradient norm's all-reduce.")
]
Head = Annotated[
    float,
    typer.Option(
        parser=finite,
        metavar="T",
        help="Time of the head's forward; each half of its backward takes as long.",
    ),
]
Latency = Annotated[
    float, typer.Option(parser=finite, metavar="T", help="Latency of a message between stages.")
]
MessageSize = Annotated[float, typer.Option(parser=finite, metavar="S", help="Size of a message.")]
Bandwidth = Annotated[
    float | None,
    typer.Option(parser=finite, metavar="B", help="Size sent per unit of time (default: unlimited)."),
]
Jitter = Annotated[
    float,
    typer.Option(parser=finite, metavar="S", help="Standard deviation of each time, as a share of it."),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the jitter.")]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Write to FILE (default: standard output).")]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Arguments that a built-in schedule is built with."""

    stages: Stages = None
    microbatches: Microbatches = None
    chunks: Chunks = None
    ahead: Ahead = None
    split: Split = None
    delay: Delay = None
    update_interval: Interval = None
    shard_head: ShardHead = None
    tied: Tied = None


@dataclass(frozen=True, kw_only=True)
class Times:
    """Times of actions and messages, in one unit."""

    forward: Forward = 1.0
    backward: Backward = 2.0
    input_half: Input = None
    weight_half: Weight = None
    head: Head = 0.0
    latency: Latency = 0.0
    jitter: Jitter = 0.0
    seed: Seed = 0
