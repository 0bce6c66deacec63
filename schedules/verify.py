"""Verifies programs, hand-written ones too: everything that a reader may rely on is checked here.

- Every stage belongs to one rank, and forwards and backwards (whole, or both halves) every micro-batch
  exactly once, in that order.
- Every version is written once and in order, by an update of the right micro-batches, and read only while it
  is there. A backward reads its forward's version (stashed) or the newest one (unstashed).
- At the end nothing is in flight, no gradient is left over, and the versions that the next segment starts
  with exist.
- The messages of a channel are received in the order in which they are sent, and there is no deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from schedules.actions import Action, Op, Program
from schedules.deadlock import find_deadlock
from schedules.errors import ScheduleError
from schedules.messages import destination, source


def verify(program: Program, *, channel_capacity: int | None = None) -> None:
    """Check `program`.

    Args:
        program: To check.
        channel_capacity: Messages that a channel holds before its sender must wait; None: any number, as in
            our executor, whose sends never wait.

    Raises:
        ScheduleError: The program is invalid; the message has a line for each problem.
    """
    problems = find_problems(program, channel_capacity=channel_capacity)
    if problems:
        raise ScheduleError("\n".join(problems))


def find_problems(program: Program, *, channel_capacity: int | None = None) -> list[str]:
    """Every problem of `program`, one sentence each; empty if it is valid.

    Later checks rely on earlier ones: where ranks do not fit the stages, only that is reported, and deadlocks
    are looked for only in a program that is valid otherwise.
    """
    problems = list(_outline_problems(program)) or list(_place_problems(program))
    if problems:
        return problems
    for stage, actions in enumerate(program.actions_by_stage()):
        problems.extend(_stage_problems(program, stage, actions))
    if problems:
        return problems
    problems = list(_order_problems(program))
    if problems:
        return problems
    deadlock = find_deadlock(program, channel_capacity=channel_capacity)
    return [] if deadlock is None else [deadlock]


def _outline_problems(program: Program) -> Iterator[str]:
    for label, value, smallest in (
        ("microbatches", program.microbatches, 1),
        ("update_interval", program.update_interval, 1),
        ("steps", program.steps, 1),
        ("first_step", program.first_step, 0),
        ("the number of stages", program.num_stages, 1),
        ("the number of ranks", program.num_ranks, 1),
    ):
        if value < smallest:
            yield f"{label} is {value}; it must be {smallest} or more"
            return
    for stage, rank in enumerate(program.rank_of_stage):
        if not 0 <= rank < program.num_ranks:
            yield f"stage {stage} is placed on rank {rank}, but there are ranks 0 to {program.num_ranks - 1}"
    for rank in set(range(program.num_ranks)) - set(program.rank_of_stage):
        yield f"rank {rank} has no stage"
    if program.updates_together and program.update_interval != program.microbatches:
        yield (
            f"update_interval is {program.update_interval}, but stages that update together do so after each "
            f"step of {program.microbatches} micro-batches; accepted: updates_together=False"
        )
    for label, versions in (("initial", program.initial_versions), ("final", program.final_versions)):
        if not versions or list(versions) != sorted(set(versions)) or versions[0] < 0:
            yield f"the {label} versions must be ascending and at least one, not {list(versions)}"
    first, end = _microbatch_range(program)
    for label, microbatch in (("start", first), ("end", end)):
        if microbatch % program.update_interval:
            yield (
                f"an update interval of {program.update_interval} does not fit the {label} of the segment, "
                f"which stands at micro-batch {microbatch}"
            )


def _place_problems(program: Program) -> Iterator[str]:
    first, end = _microbatch_range(program)
    update = Op.UPDATE
    for rank, actions in enumerate(program.actions):
        for place, action in enumerate(actions):
            stage, op, microbatch, _ = action
            if not 0 <= stage < program.num_stages:
                yield f"{_where(rank, place, action)}: there is no stage {stage}"
            elif program.rank_of_stage[stage] != rank:
                holder = program.rank_of_stage[stage]
                yield f"{_where(rank, place, action)}: stage {stage} is on rank {holder}"
            elif op is not update and not first <= microbatch < end:
                yield f"{_where(rank, place, action)}: the segment has micro-batches {first} to {end - 1}"


def _where(rank: int, place: int, action: Action) -> str:
    return f"rank {rank}, action {place} ({action})"


def _microbatch_range(program: Program) -> tuple[int, int]:
    first = program.first_step * program.microbatches
    return first, first + program.steps * program.microbatches


@dataclass
class _StageState:
    """The progress of one stage."""

    newest: int
    forwards: dict[int, int] = field(default_factory=dict)
    """Version that each micro-batch's forward read."""
    input_halves: set[int] = field(default_factory=set)
    gathered: set[int] = field(default_factory=set)
    """Micro-batches whose backward is complete."""
    since_update: list[int] = field(default_factory=list)


def _stage_problems(program: Program, stage: int, actions: list[Action]) -> Iterator[str]:
    forward, backward, input_half, update = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.UPDATE
    first, end = _microbatch_range(program)
    initial, interval = program.initial_versions, program.update_interval
    state = _StageState(newest=initial[-1])
    held_at_start = set(initial)
    for action in actions:
        _, op, microbatch, version = action
        if op is update:
            yield from _update_problems(action, state, interval)
            state.newest = version
            state.since_update = []
            continue
        if version > state.newest:
            yield f"{action} reads version {version} while the newest of stage {stage} is {state.newest}"
        elif version <= initial[-1] and version not in held_at_start:
            yield f"{action} reads version {version}; stage {stage} starts with {_listed(initial)} only"
        if op is forward:
            if microbatch in state.forwards:
                yield f"{action}: stage {stage} forwards micro-batch {microbatch} twice"
            state.forwards[microbatch] = version
            continue
        if microbatch not in state.forwards:
            yield f"{action}: micro-batch {microbatch} has no forward before this backward"
        elif version not in (state.forwards[microbatch], state.newest):
            yield (
                f"{action} must read the version of its forward ({state.forwards[microbatch]}) or the newest "
                f"({state.newest})"
            )
        if op is input_half:
            if microbatch in state.input_halves or microbatch in state.gathered:
                yield f"{action}: stage {stage} backwards micro-batch {microbatch} twice"
            state.input_halves.add(microbatch)
            continue
        if microbatch in state.gathered or (op is backward and microbatch in state.input_halves):
            yield f"{action}: stage {stage} backwards micro-batch {microbatch} twice"
        elif op is not backward and microbatch not in state.input_halves:
            yield f"{action}: there is no input half {stage}I{microbatch} before this weight half"
        state.gathered.add(microbatch)
        state.since_update.append(microbatch)
    for microbatch in range(first, end):
        if microbatch not in state.forwards:
            yield f"stage {stage} never forwards micro-batch {microbatch}"
        elif microbatch not in state.gathered:
            missing = "weight half of the backward of" if microbatch in state.input_halves else "backward of"
            yield f"stage {stage} never performs the {missing} micro-batch {microbatch}"
    if state.since_update:
        yield (
            f"stage {stage} ends with the gradient of micro-batches {_listed(state.since_update)} gathered "
            "and no update to apply it"
        )
    if state.newest != program.final_versions[-1]:
        yield f"stage {stage} ends with version {state.newest}, not with {program.final_versions[-1]}"
    for version in program.final_versions:
        if version <= initial[-1] and version not in held_at_start:
            yield f"stage {stage} must end with version {version}, which it neither starts with nor writes"


def _update_problems(action: Action, state: _StageState, interval: int) -> Iterator[str]:
    version = action.version
    if version != state.newest + 1:
        yield f"{action} writes version {version} where {state.newest + 1} is due"
        return
    due = range((version - 1) * interval, version * interval)
    gathered = set(state.since_update)
    missing = [microbatch for microbatch in due if microbatch not in gathered]
    if missing:
        yield f"{action} comes before the gradient of micro-batches {_listed(missing)} is gathered"
    foreign = [microbatch for microbatch in state.since_update if microbatch not in due]
    if foreign:
        yield f"{action} would apply the gradient of micro-batches {_listed(foreign)} of other updates"


def _order_problems(program: Program) -> Iterator[str]:
    num_stages = program.num_stages
    sent_by: dict[tuple[int, int], list[int]] = {}
    received_by: dict[tuple[int, int], list[int]] = {}
    for action in program.all_actions():
        stage, _, microbatch, _ = action
        sender, receiver = source(action, num_stages), destination(action, num_stages)
        if sender is not None:
            received_by.setdefault((sender, stage), []).append(microbatch)
        if receiver is not None:
            sent_by.setdefault((stage, receiver), []).append(microbatch)
    for (sender, receiver), in_order in sent_by.items():
        if in_order == received_by[sender, receiver]:
            continue
        for place, (given, taken) in enumerate(zip(in_order, received_by[sender, receiver], strict=True)):
            if given != taken:
                what = "activations" if receiver > sender else "gradients"
                yield (
                    f"stage {sender} sends the {what} of micro-batch {given} as number {place} to stage "
                    f"{receiver}, which takes those of micro-batch {taken} then"
                )
                break


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:8])
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} more"
