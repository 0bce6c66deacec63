"""The timeline that a run's clocks took, and what is predicted of the same actions."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncpp_cli.errors import DamagedError
from asyncpp_cli.runs import Run
from schedules.actions import Action, Op, Program, parse_action
from schedules.simulate import Timeline


@dataclass(frozen=True, kw_only=True)
class Clocked:
    """The last actions of a run's last segment, on one clock."""

    first_step: int
    """Of the segment."""
    steps: int
    """Of the segment."""
    steps_kept: float
    """How many of them the actions amount to."""
    actions: tuple[tuple[Action, ...], ...]
    """For each rank, in the order in which they were done."""
    starts: tuple[array[float], ...]
    """Seconds since the first start."""
    ends: tuple[array[float], ...]

    def as_done(self, program: Program) -> Timeline:
        """As the timeline of a program with these actions alone."""
        return Timeline(program=replace(program, actions=self.actions), starts=self.starts, ends=self.ends)

    def same_of(self, timeline: Timeline) -> Timeline:
        """The same actions in a timeline of the whole segment or its end, counted from the first of them.

        Versions need not be the same: where stages update on their own, a segment that begins later reads
        others at first.
        """
        wanted = {_key(action) for of_rank in self.actions for action in of_rank}
        kept = [
            [place for place, action in enumerate(actions) if _key(action) in wanted]
            for actions in timeline.program.actions
        ]
        begin = min(
            (starts[place] for starts, places in zip(timeline.starts, kept, strict=True) for place in places),
            default=0.0,
        )

        def of_kept(times: Sequence[array[float]]) -> tuple[array[float], ...]:
            return tuple(
                array("d", (of_rank[place] - begin for place in places))
                for of_rank, places in zip(times, kept, strict=True)
            )

        actions = tuple(
            tuple(of_rank[place] for place in places)
            for of_rank, places in zip(timeline.program.actions, kept, strict=True)
        )
        program = replace(timeline.program, actions=actions)
        return Timeline(program=program, starts=of_kept(timeline.starts), ends=of_kept(timeline.ends))


def read_clocked(run: Run) -> Clocked | None:
    """What the run's folder holds of it; None where it holds nothing.

    Raises:
        DamagedError: it cannot be read, or is of another form.
    """
    content = run.timeline()
    if content is None:
        return None
    try:
        return _clocked(content)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise DamagedError(f"{run.timeline_file} has another form ({error!r})") from error


def _clocked(content: Mapping[str, Any]) -> Clocked:
    clocked = Clocked(
        first_step=int(content["first_step"]),
        steps=int(content["steps"]),
        steps_kept=float(content["steps_kept"]),
        actions=tuple(tuple(parse_action(text) for text, _, _ in of_rank) for of_rank in content["ranks"]),
        starts=_seconds(content["ranks"], 1),
        ends=_seconds(content["ranks"], 2),
    )
    if clocked.first_step < 0 or clocked.steps < 1 or not all(clocked.actions):
        raise ValueError("a segment without steps, or a rank without actions")
    for starts, ends in zip(clocked.starts, clocked.ends, strict=True):
        if not all(0 <= start <= end < float("inf") for start, end in zip(starts, ends, strict=True)):
            raise ValueError("an action that ends before it starts")
    return clocked


def _seconds(ranks: Sequence[Sequence[Sequence[Any]]], place: int) -> tuple[array[float], ...]:
    return tuple(array("d", (timed[place] / 1e6 for timed in of_rank)) for of_rank in ranks)


def _key(action: Action) -> tuple[int, Op, int]:
    number = action.version if action.op is Op.UPDATE else action.microbatch
    return action.stage, action.op, number
