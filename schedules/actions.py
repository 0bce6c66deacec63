"""Programs: for each rank, the ordered list of actions that it performs. Schedules return them.

The printable form extends that of `torch.distributed.pipelining` (`2F0`, `1B3`, `0I4`, `0W4`) by the weight
version that an action reads, and by the optimizer step, which writes one:

    0F5@3     stage 0, forward of micro-batch 5, with weights that have seen 3 updates
    0B5@3     its backward (I and W: the input half and the weight half of a split backward)
    0U4       stage 0 applies the gradient gathered since its last update; the result is version 4
    4S5@3     shard 4 of the head: logits of micro-batch 5, and the gradient of its hidden states
    4T5@3     the gradient of that shard's weights
    4E5@3     shard 4, of a head tied to the embedding: embeds the tokens of micro-batch 5 that are its rows
    4G5@3     the gradient of its rows from that use

Micro-batches are numbered through the whole run. Sends and receives are not listed: they follow from the
others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class ScheduleError(ValueError):
    """A schedule that cannot be built, or a wrong program; the message says what and where."""


class Op(StrEnum):
    """The operation of an action."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    HEAD = "S"
    HEAD_WEIGHT = "T"
    EMBED = "E"
    EMBED_WEIGHT = "G"
    LOSS = "L"
    """Takes what shards of the head give, without a backward; in evaluations alone."""
    UPDATE = "U"


FORWARDS = (Op.FORWARD, Op.HEAD)
"""Ops that begin a micro-batch at a stage."""
ADDING_NOTHING = (*FORWARDS, Op.EMBED)
"""Ops that, like updates, add to no gradient."""

NO_MICROBATCH = -1
"""The `microbatch` of an update, which belongs to no single micro-batch."""


class Action(NamedTuple):
    """One operation of a rank: `(stage, op, microbatch, version)`.

    `version` is the version read, or for an update the version written. `microbatch` of an update is
    `NO_MICROBATCH`.
    """

    stage: int
    op: Op
    microbatch: int
    version: int

    def __str__(self) -> str:
        if self.op is Op.UPDATE:
            return f"{self.stage}U{self.version}"
        return f"{self.stage}{self.op.value}{self.microbatch}@{self.version}"


_PRINTED = re.compile(
    r"(?P<stage>\d{1,9})(?:U(?P<written>\d{1,15})|(?P<op>[FBIWSTEG])(?P<microbatch>\d{1,15})@(?P<read>\d{1,15}))"
)


def parse_action(text: str) -> Action:
    """The action that prints as `text`.

    Raises:
        ValueError: `text` is not an action in the printable form.
    """
    match = _PRINTED.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text[:60]!r} is not an action; one looks like 0F5@3, 0B5@3, 0I5@3, 0W5@3 or 0U4")
    if match["written"] is not None:
        return Action(int(match["stage"]), Op.UPDATE, NO_MICROBATCH, int(match["written"]))
    return Action(int(match["stage"]), Op(match["op"]), int(match["microbatch"]), int(match["read"]))


@dataclass(frozen=True, kw_only=True)
class Program:
    """The actions of every rank in one segment of a run: from a start to the next drain.

    The segment covers steps `first_step .. first_step + steps - 1`, so micro-batches
    `first_step * microbatches .. (first_step + steps) * microbatches - 1`.
    """

    schedule: str
    """Name of the schedule, for display only: no reader decides anything by it."""
    microbatches: int
    """Micro-batches a step."""
    update_interval: int
    """Micro-batches whose gradients one update applies (`microbatches`, unless stages update more often)."""
    steps: int
    first_step: int
    rank_of_stage: tuple[int, ...]
    """Which rank performs each stage's actions."""
    initial_versions: tuple[int, ...]
    """Versions that every stage holds when the segment starts, ascending; the last is the newest."""
    final_versions: tuple[int, ...]
    """Versions that every stage still holds at the drain, for the next segment to start with; ascending."""
    actions: tuple[tuple[Action, ...], ...]
    """For each rank, its actions in order."""
    head_shards: int = 0
    """Number of last stages that are shards of the head, one per rank; 0: the last stage has all of it."""
    tied_shards: bool = False
    """Whether these are shards of the embedding, too, which shares its matrix with the head."""
    updates_together: bool = True
    """Whether all stages update once per step, with one gradient norm and one verdict on non-finite
    gradients. If not, each stage updates on its own."""

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    @property
    def loss_stage(self) -> int:
        """The stage that knows the loss: the last one that is no shard of the head."""
        return self.num_stages - self.head_shards - 1

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def split_backward(self) -> bool:
        """Whether some backward comes as an input half and a weight half."""
        return any(action.op is Op.BACKWARD_INPUT for action in self.all_actions())

    @property
    def ends_of_steps(self) -> list[list[int]]:
        """For each rank and step of the segment, the place of the rank's last action of that step, updates
        aside."""
        marks = []
        for actions in self.actions:
            of_rank = [0] * self.steps
            for place, (_, op, microbatch, _) in enumerate(actions):
                if op is not Op.UPDATE:
                    of_rank[microbatch // self.microbatches - self.first_step] = place
            marks.append(of_rank)
        return marks

    def all_actions(self) -> Iterator[Action]:
        """Every action, rank by rank."""
        for actions in self.actions:
            yield from actions

    def actions_by_stage(self) -> list[list[Action]]:
        """For each stage, its actions in the order in which its rank performs them."""
        by_stage: list[list[Action]] = [[] for _ in self.rank_of_stage]
        for action in self.all_actions():
            by_stage[action.stage].append(action)
        return by_stage

    def stage_actions(self, stage: int) -> list[Action]:
        """The actions of one stage, in the order in which its rank performs them."""
        return [action for action in self.actions[self.rank_of_stage[stage]] if action.stage == stage]
