"""A timeline as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing: a row per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schedules.actions import Op
from schedules.simulate import Timeline

_KINDS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward, input half",
    Op.BACKWARD_WEIGHT: "backward, weight half",
    Op.HEAD: "shard of the head",
    Op.HEAD_WEIGHT: "shard of the head, weight half",
    Op.EMBED: "shard of the embedding",
    Op.EMBED_WEIGHT: "shard of the embedding, its gradient",
    Op.UPDATE: "update",
}


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """Bytes that a rank holds from a time on, by kind."""

    rank: int
    of: str
    """What the bytes are of; ends the counter's title, which begins with the rank."""
    at: float
    """Time from which on they are held, in the timeline's unit."""
    kinds: Mapping[str, int]
    """Bytes by kind."""


def chrome_trace(
    timeline: Timeline,
    *,
    microseconds_per_unit: float = 1e6,
    begin: float = 0.0,
    memory: Sequence[RankBytes] = (),
) -> dict[str, Any]:
    """The trace as the content of its JSON file.

    Args:
        timeline: What to show.
        microseconds_per_unit: Length of the costs' unit of time; by default they are in seconds.
        begin: Time at which the timeline begins, in that unit.
        memory: Shown as a counter per rank and title, stacked by kind.
    """
    program = timeline.program
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": program.schedule}},
    ]
    for rank, actions in enumerate(program.actions):
        events.append(
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        )
        for action, start, end in zip(actions, timeline.starts[rank], timeline.ends[rank], strict=True):
            details: dict[str, int] = {"stage": action.stage, "version": action.version}
            if action.op is not Op.UPDATE:
                details["microbatch"] = action.microbatch
                details["step"] = action.microbatch // program.microbatches
            events.append(
                {
                    "ph": "X",
                    "name": str(action),
                    "cat": _KINDS[action.op],
                    "pid": 0,
                    "tid": rank,
                    "ts": (begin + start) * microseconds_per_unit,
                    "dur": (end - start) * microseconds_per_unit,
                    "args": details,
                }
            )
    events += [
        {
            "ph": "C",
            "name": f"rank {held.rank}: {held.of}, bytes",
            "pid": 0,
            "ts": held.at * microseconds_per_unit,
            "args": dict(held.kinds),
        }
        for held in memory
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
