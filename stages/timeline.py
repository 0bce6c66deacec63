"""When the ranks of a pipeline did the last actions of a segment, on one clock.

Ranks of one host read the same clock (`time.perf_counter` is the host's monotonic clock). Clocks of different
hosts have nothing in common, so each is set by the latest meeting of all ranks before the segment, which no
rank leaves before the last one has come: the time of a host counts from when the first of its ranks left it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

from schedules.actions import Op
from stages.trace import RankTrace, Timed

STEPS = 4
"""Steps that a timeline goes back, from the drain."""

MOST_ACTIONS = 400
"""Of a rank in a timeline: with more in so many steps, it goes back less far."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """How a rank left a meeting of all ranks."""

    host: str
    left: float
    """Clock when it went on, seconds."""


def kept_actions(actions: int, *, steps: int) -> int:
    """Of how many actions a rank keeps the times, when it has `actions` in `steps` steps."""
    return min(MOST_ACTIONS, STEPS * -(-actions // steps))


def timeline(
    traces: Mapping[int, RankTrace], met: Mapping[int, Meeting], *, first_step: int, steps: int
) -> dict[str, Any]:
    """The last actions of a segment: rank by rank `[action, start, end]`, in the order in which done.

    Times are whole microseconds since the first start; what a rank waited lies between its actions. All ranks
    go back to the same moment, to where each one's record reaches.

    Args:
        traces: of each rank of one pipeline.
        met: how each of them left the latest meeting before the segment.
        first_step: of the segment.
        steps: of the segment.
    """
    set_by: dict[str, float] = {}
    for meeting in met.values():
        set_by[meeting.host] = min(meeting.left, set_by.get(meeting.host, meeting.left))
    of_ranks = [_counted_from(set_by[met[rank].host], traces[rank]) for rank in sorted(traces)]
    share = min(len(trace.latest) / max(1, _performed(trace)) for trace in traces.values())
    cut_short = [
        of_rank[0][1]
        for of_rank, rank in zip(of_ranks, sorted(traces), strict=True)
        if of_rank and len(of_rank) < _performed(traces[rank])
    ]
    since = max(cut_short, default=float("-inf"))
    # An update before all else is of a step that lies before.
    shown = [
        list(dropwhile(_is_update, (timed for timed in of_rank if timed[1] >= since))) for of_rank in of_ranks
    ]
    begin = min((start for of_rank in shown for _, start, _ in of_rank), default=0.0)
    return {
        "first_step": first_step,
        "steps": steps,
        "steps_kept": round(steps * share, 2),
        "ranks": [
            [
                [str(action), _microseconds(start - begin), _microseconds(end - begin)]
                for action, start, end in of
            ]
            for of in shown
        ],
    }


def _counted_from(origin: float, trace: RankTrace) -> list[Timed]:
    return [(action, start - origin, end - origin) for action, start, end in trace.latest]


def _is_update(timed: Timed) -> bool:
    return timed[0].op is Op.UPDATE


def _performed(trace: RankTrace) -> int:
    return sum(count for stage in trace.stages.values() for count, _ in stage.actions.values())


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
