"""The timeline and memory that a run measured, also as a trace, and the timeline as predicted."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from asyncpp_cli.base.errors import DamagedError, UserError
from asyncpp_cli.report.load.metrics_rows import Metrics, read_metrics
from asyncpp_cli.runs.run_folder import Run
from schedules.actions import Action, Op, Program, parse_action
from schedules.io.chrome_trace import RankBytes, chrome_trace
from schedules.simulate import Timeline
from stages.memory.estimate import StageMemory


@dataclass(frozen=True, kw_only=True)
class MeasuredTimeline:
    """The last actions of a run's last segment, on one clock."""

    first_step: int
    """First step of the segment."""
    steps: int
    """Steps of the segment."""
    steps_kept: float
    """Steps that the recorded actions cover."""
    actions: tuple[tuple[Action, ...], ...]
    """For each rank, in the order of execution."""
    starts: tuple[array[float], ...]
    """Seconds since the first start."""
    ends: tuple[array[float], ...]

    def timeline(self, program: Program) -> Timeline:
        """These actions as a timeline of `program`."""
        return Timeline(program=replace(program, actions=self.actions), starts=self.starts, ends=self.ends)

    def part_of(self, timeline: Timeline) -> Timeline:
        """The recorded actions in another timeline of the segment, starting at the first of them.

        Versions may differ: where stages update on their own, a segment that begins later reads other
        versions at first.
        """
        recorded = {_key(action) for actions in self.actions for action in actions}
        by_rank = [
            [timed for timed in zip(*of_rank, strict=True) if _key(timed[0]) in recorded]
            for of_rank in zip(timeline.program.actions, timeline.starts, timeline.ends, strict=True)
        ]
        begin = min((start for kept in by_rank for _, start, _ in kept), default=0.0)
        actions = tuple(tuple(action for action, _, _ in kept) for kept in by_rank)
        return Timeline(
            program=replace(timeline.program, actions=actions),
            starts=tuple(array("d", (start - begin for _, start, _ in kept)) for kept in by_rank),
            ends=tuple(array("d", (end - begin for _, _, end in kept)) for kept in by_rank),
        )


def read_measured_timeline(run: Run) -> MeasuredTimeline | None:
    """The timeline in the run's folder; None if there is none.

    Raises:
        DamagedError: the file cannot be read, or has another form.
    """
    content = run.timeline()
    if content is None:
        return None
    try:
        return _parsed(content)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise DamagedError(f"{run.timeline_file} has another form ({error!r})") from error


def measured_trace(run: Run) -> dict[str, Any]:
    """A Chrome trace of the last actions that a run measured, and of the memory of each of its segments.

    Its time is that of training, which excludes evaluations and checkpoints. A segment's memory is its peak.

    Raises:
        UserError: no timeline was measured.
        DamagedError: a file cannot be read, or has another form.
    """
    measured = read_measured_timeline(run)
    if measured is None:
        raise UserError(f"{run.folder}: no timeline was measured yet (replays have none)")
    try:
        return _trace(run.id, read_metrics(run), measured)
    except (IndexError, KeyError, ValueError) as error:
        raise DamagedError(f"{run.metrics_file} has another form ({error!r})") from error


def _trace(run_id: str, metrics: Metrics, measured: MeasuredTimeline) -> dict[str, Any]:
    """The trace of a measured timeline, which ends where its segment was drained.

    Raises:
        IndexError, KeyError, ValueError: the metrics have another form.
    """
    start = metrics.starts[-1]
    if start.microbatches is None or start.rank_of_stage is None:
        raise KeyError("microbatches, rank_of_stage")
    program = Program(
        schedule=run_id,
        microbatches=start.microbatches,
        update_interval=start.microbatches,
        steps=measured.steps,
        first_step=measured.first_step,
        rank_of_stage=tuple(start.rank_of_stage),
        initial_versions=(),
        final_versions=(),
        actions=measured.actions,
    )
    memory: list[RankBytes] = []
    started = drained = 0.0
    for segment in metrics.segments:
        started, drained = drained, segment.seconds
        for rank in range(program.num_ranks):
            bytes_by_title = _bytes_of_rank(segment.memory or {}, program.rank_of_stage, rank)
            memory += [
                RankBytes(rank=rank, of=title, at=at, kinds=kinds)
                for title, kinds in bytes_by_title.items()
                for at in (started, drained)
            ]
        if segment.first_step == measured.first_step:
            break
    seconds = max(end for ends in measured.ends for end in ends)
    return chrome_trace(measured.timeline(program), begin=max(started, drained - seconds), memory=memory)


def _bytes_of_rank(
    memory: Mapping[str, Sequence[int]], rank_of_stage: Sequence[int], rank: int
) -> dict[str, dict[str, int]]:
    """Bytes at a rank in a segment, by kind: of its tensors and, on a GPU, of torch's allocator."""
    own = [stage for stage, owner in enumerate(rank_of_stage) if owner == rank]
    kinds = {kind.name: sum(memory[kind.name][stage] for stage in own) for kind in fields(StageMemory)}
    # The stages of a rank need not hold their most at one time.
    kinds["activations"] = memory["rank_activations"][rank]
    kinds |= {kind: memory[kind][rank] for kind in ("messages", "reduction")}
    device = {
        kind.removeprefix("device_"): memory[kind][rank]
        for kind in ("device_peak", "device_reserved")
        if memory[kind]
    }
    return {"memory": kinds} | ({"allocator": device} if device else {})


def _parsed(content: Mapping[str, Any]) -> MeasuredTimeline:
    timeline = MeasuredTimeline(
        first_step=int(content["first_step"]),
        steps=int(content["steps"]),
        steps_kept=float(content["steps_kept"]),
        actions=tuple(tuple(parse_action(text) for text, _, _ in timed) for timed in content["ranks"]),
        starts=_seconds(content["ranks"], 1),
        ends=_seconds(content["ranks"], 2),
    )
    if timeline.first_step < 0 or timeline.steps < 1 or not all(timeline.actions):
        raise ValueError("a segment without steps, or a rank without actions")
    for starts, ends in zip(timeline.starts, timeline.ends, strict=True):
        if not all(0 <= start <= end < float("inf") for start, end in zip(starts, ends, strict=True)):
            raise ValueError("an action that ends before it starts")
    return timeline


def _seconds(ranks: Sequence[Sequence[Sequence[Any]]], index: int) -> tuple[array[float], ...]:
    return tuple(array("d", (action[index] / 1e6 for action in timed)) for timed in ranks)


def _key(action: Action) -> tuple[int, Op, int]:
    number = action.version if action.op is Op.UPDATE else action.microbatch
    return action.stage, action.op, number
