"""Staleness and memory of a program, counted exactly from its version numbers, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from schedules.actions import ADDING_NOTHING, FORWARDS, Action, Op, Program


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Properties of a program. Tuples are indexed by stage, `rank_activations` by rank."""

    delay_min: tuple[int, ...]
    """Minimum over gradients of the updates between the weights of the forward and those updated."""
    delay_max: tuple[int, ...]
    """Maximum over gradients of the updates between the weights of the forward and those updated."""
    mismatch_max: tuple[int, ...]
    """Maximum over micro-batches of the versions between the weights of forward and backward."""
    versions: tuple[int, ...]
    """Maximum number of weight versions held at once: the replicas that the stage needs."""
    activations: tuple[int, ...]
    """Maximum number of micro-batches in flight: forwarded, and the backward or half of it still to come."""
    rank_activations: tuple[int, ...]
    """For each rank, the maximum number of micro-batches in flight at a time, where each of its stages counts
    but a shard of the head."""
    slack: tuple[int | None, ...]
    """Minimum over updates of the forwards between an update and the first reader of its version.

    None where no update of the segment has a reader in it.
    """

    @property
    def synchronous(self) -> bool:
        """Whether every gradient is applied to the weights that it was computed at."""
        return max(self.delay_max) == 0 and max(self.mismatch_max) == 0


class Staleness(NamedTuple):
    """How old the weights of a program are, and how many versions it needs: fields of `Analysis`, by stage,
    that are counted without the others."""

    delay_min: tuple[int, ...]
    delay_max: tuple[int, ...]
    mismatch_max: tuple[int, ...]
    versions: tuple[int, ...]


def staleness(program: Program) -> Staleness:
    """The staleness of `program`, which must be valid (see `verify`)."""
    found = [
        (*_delays(program, actions), _versions(program, actions)) for actions in program.actions_by_stage()
    ]
    return Staleness(*zip(*found, strict=True))


def analyze(program: Program) -> Analysis:
    """The properties of `program`, which must be valid (see `verify`)."""
    by_stage = program.actions_by_stage()
    return Analysis(
        **staleness(program)._asdict(),
        activations=tuple(_in_flight(actions) for actions in by_stage),
        rank_activations=tuple(
            _in_flight([action for action in actions if action.stage <= program.loss_stage])
            for actions in program.actions
        ),
        slack=tuple(_slack(actions) for actions in by_stage),
    )


def _delays(program: Program, actions: list[Action]) -> tuple[int, int, int]:
    """Minimum delay, maximum delay and maximum mismatch of one stage."""
    update = Op.UPDATE
    forwarded_at: dict[int, int] = {}
    delays: set[int] = set()
    mismatches: set[int] = set()
    for _, op, microbatch, version in actions:
        if op in ADDING_NOTHING:
            forwarded_at[microbatch] = version
            # The version that this micro-batch's gradient is applied to: micro-batch i belongs to update
            # i // interval + 1, which `verify` holds every program to.
            delays.add(microbatch // program.update_interval - version)
        elif op is not update:
            mismatches.add(version - forwarded_at[microbatch])
    return min(delays), max(delays), max(mismatches)


def _versions(program: Program, actions: list[Action]) -> int:
    """Number of replicas with which no version is overwritten before its last reader.

    An update overwrites the oldest replica, so all versions from the oldest live one to the newest are held.
    Nobody reads some of them where a segment has fewer micro-batches than stages.
    """
    update = Op.UPDATE
    last_read = {version: place for place, (_, op, _, version) in enumerate(actions) if op is not update}
    kept = set(program.final_versions)
    alive = set(program.initial_versions)
    most = len(alive)
    for place, (_, op, _, version) in enumerate(actions):
        if op is update:
            alive = {old for old in alive if old in kept or last_read.get(old, -1) > place}
            alive.add(version)
            most = max(most, version - min(alive) + 1)
    return most


_ENDS = (Op.BACKWARD, Op.BACKWARD_WEIGHT, Op.HEAD_WEIGHT)


def _in_flight(actions: tuple[Action, ...] | list[Action]) -> int:
    """Maximum number of micro-batches in flight over the actions of a stage or rank."""
    now = most = 0
    for action in actions:
        op = action[1]
        if op in FORWARDS:
            now += 1
            if now > most:
                most = now
        elif op in _ENDS:
            now -= 1
    return most


def _slack(actions: list[Action]) -> int | None:
    """Minimum number of forwards between an update and the first reader of its version."""
    update = Op.UPDATE
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
        if op in FORWARDS:
            forwards += 1
    return slack
