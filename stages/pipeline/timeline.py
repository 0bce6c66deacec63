"""The timeline of a segment: its last actions on all ranks of a pipeline, on one clock.

Ranks of one host share a clock (`time.perf_counter` is the host's monotonic clock). Clocks of different hosts
are unrelated, so each is set by the latest meeting of all ranks before the segment, which no rank leaves
before the last one arrives: times of a host count from when the first of its ranks left it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

from schedules.actions import Op
from stages.update.rank_stats import RankTrace, Timed

STEPS = 4
"""Steps that a timeline covers, back from the drain."""

MOST_ACTIONS = 400
"""Maximum number of a rank's actions in a timeline; with more, it covers fewer steps."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """When a rank left a meeting of all ranks."""

    host: str
    left: float
    """Seconds of `time.perf_counter`."""


def kept_actions(actions: int, *, steps: int) -> int:
    """Number of actions to timestamp on a rank that has `actions` in `steps` steps."""
    # One more than are shown: ranks are not at the same place when their records begin.
    return min(MOST_ACTIONS, (STEPS + 1) * -(-actions // steps))


def timeline(
    traces: Mapping[int, RankTrace],
    met: Mapping[int, Meeting],
    *,
    first_step: int,
    steps: int,
    microbatches: int,
) -> dict[str, Any]:
    """The last actions of a segment: rank by rank `[action, start, end]`, in order of completion.

    Times are whole microseconds since the first start; a rank waits between its actions. All ranks start at
    the same moment, when the first stage begins a step: one that every rank has recorded, unless a step has
    too many actions.

    Args:
        traces: of each rank of one pipeline.
        met: when each of them left the latest meeting before the segment.
        first_step: of the segment.
        steps: of the segment.
        microbatches: per step.
    """
    origins: dict[str, float] = {}
    for meeting in met.values():
        origins[meeting.host] = min(meeting.left, origins.get(meeting.host, meeting.left))
    by_rank = [_relative_to(origins[met[rank].host], traces[rank]) for rank in sorted(traces)]
    cut_short = [
        rank_actions[0][1]
        for rank_actions, rank in zip(by_rank, sorted(traces), strict=True)
        if rank_actions and len(rank_actions) < _performed(traces[rank])
    ]
    since = max(cut_short, default=float("-inf"))
    begun = [
        (start, first_step + steps - action.microbatch // microbatches)
        for rank_actions in by_rank
        for action, start, _ in rank_actions
        if (action.stage, action.op) == (0, Op.FORWARD) and action.microbatch % microbatches == 0
    ]
    kept = steps * min(len(trace.latest) / max(1, _performed(trace)) for trace in traces.values())
    whole = [(start, left) for start, left in begun if start >= since and left <= STEPS]
    if cut_short and whole:
        since, kept = min(whole)
    # An update that comes first belongs to an earlier step.
    shown = [
        list(dropwhile(_is_update, (timed for timed in rank_actions if timed[1] >= since)))
        for rank_actions in by_rank
    ]
    begin = min((start for rank_actions in shown for _, start, _ in rank_actions), default=0.0)
    return {
        "first_step": first_step,
        "steps": steps,
        "steps_kept": round(kept, 2),
        "ranks": [
            [
                [str(action), _microseconds(start - begin), _microseconds(end - begin)]
                for action, start, end in rank_actions
            ]
            for rank_actions in shown
        ],
    }


def _relative_to(origin: float, trace: RankTrace) -> list[Timed]:
    return [(action, start - origin, end - origin) for action, start, end in trace.latest]


def _is_update(timed: Timed) -> bool:
    return timed[0].op is Op.UPDATE


def _performed(trace: RankTrace) -> int:
    return sum(count for stage in trace.stages.values() for count, _ in stage.actions.values())


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
