"""FSDP and HSDP (arXiv 2304.11277): no pipelines, but what they are compared with. Every process computes the
whole model, of which it holds a shard, on micro-batches of its own.

The program is that of a pipeline of one stage. A cell with d pipelines of p stages, each with m micro-batches
per step, has p d processes here, too, all of them data ranks with m / p micro-batches: a step reads the same
sequences either way.
"""

from __future__ import annotations

from dataclasses import replace

from schedules.actions import Program, ScheduleError
from schedules.library.one_f_one_b import one_f_one_b
from schedules.schedule import Schedule
from schedules.segment import Segment


def _one_stage(segment: Segment, name: str) -> Program:
    """The program of each process, with its share of the micro-batches of a pipeline."""
    own, left = divmod(segment.microbatches, segment.ranks)
    if left:
        near = sorted({max(own, 1) * segment.ranks, (own + 1) * segment.ranks})
        raise ScheduleError(
            f"{name} shares the {segment.microbatches} micro-batches of a step evenly among the "
            f"{segment.ranks} processes of a pipeline; accepted: a multiple of {segment.ranks}, such as "
            f"{' or '.join(map(str, near))}"
        )
    return replace(one_f_one_b(replace(segment, ranks=1, microbatches=own)), schedule=name)


def fsdp(segment: Segment) -> Program:
    """Shards over all processes."""
    return _one_stage(segment, "fsdp")


def hsdp(segment: Segment) -> Program:
    """Shards over a group of processes; each group has the whole model."""
    return _one_stage(segment, "hsdp")


FSDP = Schedule(
    name="fsdp",
    description="the whole model on every process, in shards (torch's fully_shard)",
    program=fsdp,
    synchronous=True,
    sharded=True,
)
HSDP = Schedule(
    name="hsdp",
    description="shards within groups of processes, each with the whole model",
    program=hsdp,
    synchronous=True,
    sharded=True,
)
