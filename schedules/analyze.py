"""What a program costs in staleness and memory, counted exactly from its version numbers, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass

from schedules.actions import Action, Op, Program


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The properties of a program. Tuples are indexed by stage (`rank_activations` by rank)."""

    delay_min: tuple[int, ...]
    """Least updates, over all gradients, between the weights of the forward and those applied to."""
    delay_max: tuple[int, ...]
    """Most updates, over all gradients, between the weights of the forward and those applied to."""
    mismatch_max: tuple[int, ...]
    """Most versions, over all micro-batches, between the weights of forward and backward."""
    versions: tuple[int, ...]
    """Most weight versions alive at once: the replicas that the stage needs."""
    activations: tuple[int, ...]
    """Most micro-batches in flight at once: forwarded, with (half of) their backward still to come."""
    rank_activations: tuple[int, ...]
    """The same, summed over the stages of each rank; a rank of several chunks counts each of them."""
    slack: tuple[int | None, ...]
    """Fewest forwards, over all updates, between an update and the first reader of its version.

    None where no update of the segment has a reader in it.
    """


def analyze(program: Program) -> Analysis:
    """The properties of `program`, which must be right (see `verify`)."""
    by_stage = program.actions_by_stage()
    delays = [_delays(program, actions) for actions in by_stage]
    return Analysis(
        delay_min=tuple(least for least, _, _ in delays),
        delay_max=tuple(largest for _, largest, _ in delays),
        mismatch_max=tuple(mismatch for _, _, mismatch in delays),
        versions=tuple(_versions(program, actions) for actions in by_stage),
        activations=tuple(_in_flight(actions) for actions in by_stage),
        rank_activations=tuple(_in_flight(actions) for actions in program.actions),
        slack=tuple(_slack(actions) for actions in by_stage),
    )


def _delays(program: Program, actions: list[Action]) -> tuple[int, int, int]:
    """Least delay, largest delay and largest mismatch of one stage."""
    forward, update = Op.FORWARD, Op.UPDATE
    forwarded_at: dict[int, int] = {}
    delays: set[int] = set()
    mismatches: set[int] = set()
    for _, op, microbatch, version in actions:
        if op is forward:
            forwarded_at[microbatch] = version
            # The version that this micro-batch's gradient is applied to: micro-batch i belongs to update
            # i // interval + 1, which `verify` holds every program to.
            delays.add(microbatch // program.update_interval - version)
        elif op is not update:
            mismatches.add(version - forwarded_at[microbatch])
    return min(delays), max(delays), max(mismatches)


def _versions(program: Program, actions: list[Action]) -> int:
    """Most versions alive at once; one dies with its last reader, before the next update is written."""
    update = Op.UPDATE
    last_read = {version: place for place, (_, op, _, version) in enumerate(actions) if op is not update}
    kept = set(program.final_versions)
    alive = set(program.initial_versions)
    most = len(alive)
    for place, (_, op, _, version) in enumerate(actions):
        if op is update:
            alive = {old for old in alive if old in kept or last_read.get(old, -1) > place}
            alive.add(version)
            most = max(most, len(alive))
    return most


def _in_flight(actions: tuple[Action, ...] | list[Action]) -> int:
    """Most micro-batches in flight over a stage's or a rank's actions."""
    forward, backward, weight_half = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_WEIGHT
    now = most = 0
    for action in actions:
        op = action[1]
        if op is forward:
            now += 1
            if now > most:
                most = now
        elif op is backward or op is weight_half:
            now -= 1
    return most


def _slack(actions: list[Action]) -> int | None:
    """Fewest forwards between an update and the first reader of its version."""
    forward, update = Op.FORWARD, Op.UPDATE
    forwards = 0
    forwards_at_update: dict[int, int] = {}
    slack: int | None = None
    for _, op, _, version in actions:
        if op is update:
            forwards_at_update[version] = forwards
            continue
        written_at = forwards_at_update.pop(version, None)
        if written_at is not None and (slack is None or forwards - written_at < slack):
            slack = forwards - written_at
        if op is forward:
            forwards += 1
    return slack
