"""Verifies programs, hand-written ones too: everything that a reader may rely on is checked here.

- Every stage belongs to one rank, and forwards and backwards (whole, or both halves) every micro-batch
  exactly once, in that order. A shard of the head has S and T of each; all shards read the version that the
  forward of the stage before them reads. One of a tied head has E and G of each, too, at the version that
  stage 0 reads, and both parts of its gradient go to the same update.
- Every version is written once and in order, by an update of the right micro-batches, and read only while it
  is there. A backward reads its forward's version (stashed) or the newest one (unstashed).
- At the end nothing is in flight, no gradient is left over, and the versions that the next segment starts
  with exist.
- The messages of a channel are received in the order in which they are sent, and there is no deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from schedules.actions import Action, Op, Program, ScheduleError
from schedules.deadlock import find_deadlock
from schedules.messages import Channel, Kind, channel_ends


def verify(program: Program, *, channel_capacity: int | None = None) -> None:
    """Check `program`.

    Args:
        program: To check.
        channel_capacity: Messages of a kind between two ranks before their sender must wait; None: any
            number. The trainer gives each program as many as it needs
            (`schedules.deadlock.sends_in_flight`).

    Raises:
        ScheduleError: The program is invalid; the message has a line for each problem.
    """
    problems = find_problems(program, channel_capacity=channel_capacity)
    if problems:
        raise ScheduleError("\n".join(problems))


def find_problems(program: Program, *, channel_capacity: int | None = None) -> list[str]:
    """Every problem of `program`, one sentence each; empty if it is valid.

    Problems of one kind share a sentence. Later checks rely on earlier ones: where ranks do not fit the
    stages, only that is reported, and deadlocks are looked for only in a program that is valid otherwise.
    """
    if problems := list(_outline_problems(program)):
        return problems
    for problems_of in (_place_problems, _problems_of_stages, _order_problems):
        if problems := _grouped(problems_of(program)):
            return problems
    deadlock = find_deadlock(program, channel_capacity=channel_capacity)
    return [] if deadlock is None else [deadlock]


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """What is wrong at one place."""

    kind: str
    """What problems like it have in common: they are reported as one."""
    where: tuple[str, object]
    """What it belongs to: ("stage", 3) or ("rank", 0)."""
    first: str
    """The action, micro-batch or version concerned."""
    sentence: str
    """The whole of it, where no other problem is like it."""
    count: int = 1


def _grouped(problems: Iterable[_Problem]) -> list[str]:
    """A sentence for each kind of problem, in the order in which the kinds first occur."""
    kinds: dict[str, list[_Problem]] = {}
    for problem in problems:
        kinds.setdefault(problem.kind, []).append(problem)
    sentences = []
    for kind, alike in kinds.items():
        if len(alike) == 1:
            sentences.append(alike[0].sentence)
            continue
        what = alike[0].where[0]
        where = list(dict.fromkeys(str(problem.where[1]) for problem in alike))
        count = sum(problem.count for problem in alike)
        sentences.append(
            f"{what}{'s' if len(where) > 1 else ''} {_listed(where, last=' and ')}: {kind}; "
            f"first {alike[0].first}; {count} in all"
        )
    return sentences


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
    if program.head_shards:
        yield from _shard_problems(program)
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
    if end - first > (actions := sum(len(rank_actions) for rank_actions in program.actions)):
        yield (
            f"the segment has {end - first:,} micro-batches (steps {program.steps}, microbatches "
            f"{program.microbatches}), and the program {actions:,} actions"
        )


def _shard_problems(program: Program) -> Iterator[str]:
    if program.loss_stage < 0:
        yield f"all of the {program.num_stages} stages are shards of the head"
    elif program.rank_of_stage[program.loss_stage + 1 :] != tuple(range(program.num_ranks)):
        yield f"the last {program.head_shards} stages must be shards of the head on ranks 0, 1, ..., one each"
    if not program.updates_together:
        yield "stages update on their own, and shards of the head must update together"


_OPS_OF_SHARDS = (Op.HEAD, Op.HEAD_WEIGHT, Op.UPDATE)
_OPS_OF_TIED_SHARDS = (*_OPS_OF_SHARDS, Op.EMBED, Op.EMBED_WEIGHT)
_OPS_OF_BLOCKS = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.UPDATE)


def _place_problems(program: Program) -> Iterator[_Problem]:
    first, end = _microbatch_range(program)
    update = Op.UPDATE
    of_shards = _OPS_OF_TIED_SHARDS if program.tied_shards else _OPS_OF_SHARDS
    for rank, actions in enumerate(program.actions):
        for place, action in enumerate(actions):
            stage, op, microbatch, _ = action
            if not 0 <= stage < program.num_stages:
                kind, problem = "actions of missing stages", f"there is no stage {stage}"
            elif program.rank_of_stage[stage] != rank:
                kind = "actions of other ranks' stages"
                problem = f"stage {stage} is on rank {program.rank_of_stage[stage]}"
            elif op not in (of_shards if stage > program.loss_stage else _OPS_OF_BLOCKS):
                kind = "actions of another kind of stage"
                problem = f"stage {stage} is {'a' if stage > program.loss_stage else 'no'} shard of the head"
            elif op is not update and not first <= microbatch < end:
                kind, problem = "micro-batches of another segment", f"the segment has {first} to {end - 1}"
            else:
                continue
            yield _Problem(
                kind=kind,
                where=("rank", rank),
                first=f"action {place} of rank {rank} ({action}: {problem})",
                sentence=f"rank {rank}, action {place} ({action}): {problem}",
            )


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
    """Micro-batches whose backward is complete, at a shard of the head but for its use as embedding."""
    embedded: dict[int, int] = field(default_factory=dict)
    """At a shard of a tied head: version that each look-up read."""
    added: set[int] = field(default_factory=set)
    """At a shard of a tied head: micro-batches whose gradient of the embedding is added."""
    since_update: list[int] = field(default_factory=list)


def _problems_of_stages(program: Program) -> Iterator[_Problem]:
    by_stage = program.actions_by_stage()
    for stage, actions in enumerate(by_stage):
        yield from _stage_problems(program, stage, actions)
    for stage in range(program.loss_stage + 1, program.num_stages):
        last, actions = program.loss_stage, by_stage[stage]
        yield from _shard_version_problems(Op.HEAD, last, by_stage[last], actions)
        if program.tied_shards:
            yield from _shard_version_problems(Op.EMBED, 0, by_stage[0], actions)


def _shard_version_problems(
    op: Op, stage: int, of_stage: list[Action], actions: list[Action]
) -> Iterator[_Problem]:
    """Where a shard's `op` reads another version than the forward of `stage`, next to it."""
    read = {action.microbatch: action.version for action in of_stage if action.op is Op.FORWARD}
    for action in actions:
        if action.op is op and action.version != (version := read.get(action.microbatch, action.version)):
            yield _Problem(
                kind=f"shards of the head read another version than stage {stage}",
                where=("stage", action.stage),
                first=str(action),
                sentence=f"{action} must read version {version}, as stage {stage} does",
            )


class _Report(Protocol):
    """Makes a problem of one stage."""

    def __call__(self, kind: str, at: object, sentence: str, *, count: int = 1) -> _Problem: ...


def _stage_problems(program: Program, stage: int, actions: list[Action]) -> Iterator[_Problem]:
    forward, backward, input_half, update = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.UPDATE
    head = Op.HEAD  # a forward with the input half of the backward
    is_tied = program.tied_shards and stage > program.loss_stage
    initial, interval = program.initial_versions, program.update_interval
    state = _StageState(newest=initial[-1])
    held_at_start = set(initial)

    def problem(kind: str, at: object, sentence: str, *, count: int = 1) -> _Problem:
        return _Problem(kind=kind, where=("stage", stage), first=str(at), sentence=sentence, count=count)

    def twice(action: Action) -> _Problem:
        sentence = f"{action}: stage {stage} backwards micro-batch {action.microbatch} twice"
        return problem("micro-batches have two backwards", action, sentence)

    for action in actions:
        _, op, microbatch, version = action
        if op is update:
            for kind, sentence in _update_problems(action, state, interval, is_tied=is_tied):
                yield problem(kind, action, sentence)
            state.newest = version
            state.since_update = []
            continue
        if version > state.newest or (version <= initial[-1] and version not in held_at_start):
            yield _read_problem(action, state.newest, initial, problem)
        if op is Op.EMBED or op is Op.EMBED_WEIGHT:
            yield from _embedding_problems(action, state, interval, problem)
            continue
        if op is forward or op is head:
            if microbatch in state.forwards:
                yield problem(
                    "micro-batches have two forwards",
                    action,
                    f"{action}: stage {stage} forwards micro-batch {microbatch} twice",
                )
            state.forwards[microbatch] = version
            if op is head:
                state.input_halves.add(microbatch)
            continue
        if microbatch not in state.forwards:
            yield problem(
                "backwards come before their forward",
                action,
                f"{action}: micro-batch {microbatch} has no forward before this backward",
            )
        elif version not in (state.forwards[microbatch], state.newest):
            yield problem(
                "backwards read neither the version of their forward nor the newest",
                action,
                f"{action} must read the version of its forward ({state.forwards[microbatch]}) or the newest "
                f"({state.newest})",
            )
        if op is input_half:
            if microbatch in state.input_halves or microbatch in state.gathered:
                yield twice(action)
            state.input_halves.add(microbatch)
            continue
        if microbatch in state.gathered or (op is backward and microbatch in state.input_halves):
            yield twice(action)
        elif op is not backward and microbatch not in state.input_halves:
            yield problem(
                "weight halves come before their input half",
                action,
                f"{action}: there is no input half {stage}I{microbatch} before this weight half",
            )
        state.gathered.add(microbatch)
        if is_tied and microbatch // interval > state.newest + 1:
            yield problem(
                "gradients of a tied head are gathered more than one update ahead",
                action,
                f"{action} belongs to update {microbatch // interval + 1}, and the newest version of stage "
                f"{stage} is {state.newest}: there are gradients of two updates at a time",
            )
        if not is_tied or microbatch in state.added:
            state.since_update.append(microbatch)
    yield from _end_problems(program, stage, state, problem)


def _read_problem(action: Action, newest: int, initial: tuple[int, ...], problem: _Report) -> _Problem:
    """The problem of an action that reads a version which its stage does not have."""
    stage, version = action.stage, action.version
    if version > newest:
        return problem(
            f"version k + {version - newest} is read before it is written, where k is the newest",
            action,
            f"{action} reads version {version} while the newest of stage {stage} is {newest}",
        )
    return problem(
        f"versions are read that a stage does not start with (it has {_listed(initial)})",
        action,
        f"{action} reads version {version}; stage {stage} starts with {_listed(initial)} only",
    )


def _embedding_problems(
    action: Action, state: _StageState, interval: int, problem: _Report
) -> Iterator[_Problem]:
    """Problems of a head shard's embedding look-up or its gradient; notes the micro-batch in `state`."""
    stage, op, microbatch, version = action
    if op is Op.EMBED:
        if microbatch in state.embedded:
            sentence = f"{action}: stage {stage} embeds micro-batch {microbatch} twice"
            yield problem("micro-batches are embedded twice", action, sentence)
        state.embedded[microbatch] = version
        return
    if state.embedded.get(microbatch) != version or microbatch in state.added:
        yield problem(
            "gradients of the embedding without a look-up of their own",
            action,
            f"{action}: there is no look-up {stage}E{microbatch}@{version} before it, or its "
            "gradient was added before",
        )
    if microbatch // interval > state.newest:
        yield problem(
            "gradients of the embedding are added to those of an earlier step",
            action,
            f"{action} adds to the gradient of update {state.newest + 1}, which is not its own",
        )
    state.added.add(microbatch)
    if microbatch in state.gathered:
        state.since_update.append(microbatch)


def _end_problems(program: Program, stage: int, state: _StageState, problem: _Report) -> Iterator[_Problem]:
    """What a stage has left undone at the end of its segment."""
    first, end = _microbatch_range(program)
    initial = program.initial_versions
    is_tied = program.tied_shards and stage > program.loss_stage
    if is_tied and (missing_ones := set(range(first, end)) - state.added):
        yield problem(
            "gradients of the embedding are missing",
            f"micro-batch {min(missing_ones)} of stage {stage}",
            f"stage {stage} never adds the gradient of the embedding of micro-batches "
            f"{_listed(sorted(missing_ones))}",
            count=len(missing_ones),
        )
    unfinished = [] if state.gathered == state.forwards.keys() else state.forwards.keys() - state.gathered
    for half, what, count, missing in (
        (
            "forward",
            "forwards",
            end - first - len(state.forwards),
            (microbatch for microbatch in range(first, end) if microbatch not in state.forwards),
        ),
        (
            "weight half",
            "performs the weight half of the backward of",
            len(halves := state.input_halves.intersection(unfinished)),
            sorted(halves),
        ),
        ("backward", "performs the backward of", len(none := set(unfinished) - halves), sorted(none)),
    ):
        if count:
            some = list(islice(missing, _MOST_LISTED))
            yield problem(
                f"micro-batches have no {half}",
                f"micro-batch {some[0]} of stage {stage}",
                f"stage {stage} never {what} micro-batch{'es' if count > 1 else ''} "
                f"{_listed(some, count=count)}",
                count=count,
            )
    if state.since_update:
        yield problem(
            "gradients are left at the end, and no update applies them",
            f"micro-batch {state.since_update[0]} of stage {stage}",
            f"stage {stage} ends with the gradient of micro-batches {_listed(state.since_update)} gathered "
            "and no update to apply it",
        )
    if state.newest != program.final_versions[-1]:
        yield problem(
            f"the last version is not {program.final_versions[-1]}",
            f"version {state.newest} of stage {stage}",
            f"stage {stage} ends with version {state.newest}, not with {program.final_versions[-1]}",
        )
    for version in program.final_versions:
        if version <= initial[-1] and version not in initial:
            yield problem(
                f"version {version} is to be held at the end, and is neither there at the start nor written",
                f"stage {stage}",
                f"stage {stage} must end with version {version}, which it neither starts with nor writes",
            )


def _update_problems(
    action: Action, state: _StageState, interval: int, *, is_tied: bool
) -> Iterator[tuple[str, str]]:
    """Kind and sentence of each problem of an update; `is_tied`: of a shard of a tied head."""
    version = action.version
    end = version * interval
    if is_tied and (halves := sorted(half for half in state.gathered ^ state.added if half < end)):
        yield (
            "updates come between the two parts of a tied gradient",
            f"{action} comes between the two parts of the gradient of micro-batches {_listed(halves)}",
        )
    if version != state.newest + 1:
        yield (
            "updates write another version than the next",
            f"{action} writes version {version} where {state.newest + 1} is due",
        )
        return
    due = range((version - 1) * interval, version * interval)
    gathered = set(state.since_update)
    if missing := [microbatch for microbatch in due if microbatch not in gathered]:
        yield (
            "updates come before their gradient is gathered",
            f"{action} comes before the gradient of micro-batches {_listed(missing)} is gathered",
        )
    if foreign := [microbatch for microbatch in state.since_update if microbatch not in due]:
        yield (
            "updates would apply the gradient of other updates",
            f"{action} would apply the gradient of micro-batches {_listed(foreign)} of other updates",
        )


def _order_problems(program: Program) -> Iterator[_Problem]:
    ends = channel_ends(program)
    sent_by: dict[Channel, list[int]] = {}
    received_by: dict[Channel, list[int]] = {}
    for stage, op, microbatch, _ in program.all_actions():
        receives, sends = ends[stage, op]
        for channel in receives:
            received_by.setdefault(channel, []).append(microbatch)
        for channel in sends:
            sent_by.setdefault(channel, []).append(microbatch)
    for channel, in_order in sent_by.items():
        if in_order == received_by[channel]:
            continue
        sender, receiver, kind = channel
        what = "gradients" if kind is Kind.GRADIENT else kind
        for place, (given, taken) in enumerate(zip(in_order, received_by[channel], strict=True)):
            if given != taken:
                yield _Problem(
                    kind=f"{what} are sent in another order than the neighbour takes them",
                    where=("stage", sender),
                    first=f"micro-batch {given} to stage {receiver}",
                    sentence=f"stage {sender} sends the {what} of micro-batch {given} as number {place} to "
                    f"stage {receiver}, which takes those of micro-batch {taken} then",
                )
                break


_MOST_LISTED = 8


def _listed(items: Sequence[object], *, count: int | None = None, last: str = ", ") -> str:
    """The first of the items with commas between, and how many more there are (`count` in all)."""
    shown = [str(item) for item in items[:_MOST_LISTED]]
    if more := (len(items) if count is None else count) - len(shown):
        return f"{', '.join(shown)} and {more} more"
    return last.join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
