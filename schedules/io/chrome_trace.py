"""A timeline as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing: a row per rank."""

from __future__ import annotations

from typing import Any

from schedules.actions import Op
from schedules.simulate import Timeline

_KINDS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward, input half",
    Op.BACKWARD_WEIGHT: "backward, weight half",
    Op.UPDATE: "update",
}


def chrome_trace(timeline: Timeline, *, microseconds_per_unit: float = 1e6) -> dict[str, Any]:
    """The trace as the content of its JSON file.

    Args:
        timeline: What to show.
        microseconds_per_unit: Length of the costs' unit of time; by default they are in seconds.
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
                    "ts": start * microseconds_per_unit,
                    "dur": (end - start) * microseconds_per_unit,
                    "args": details,
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
