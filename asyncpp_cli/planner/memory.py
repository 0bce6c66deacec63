"""Memory of each rank of a run, by kind, at its fullest moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from asyncpp_cli.planner.pace import Pace
from asyncpp_cli.planner.peak_memory import (
    allocator_bytes,
    backward_bytes,
    communicator_bytes,
    forward_bytes,
    slot_bytes,
    update_bytes,
)
from asyncpp_cli.planner.programs import LayoutProgram
from asyncpp_cli.planner.shared import Found, delayed_settings, kind_of, layout_cuts, own_cut_of, settings_of
from schedules import Op
from schedules.messages import MOST_QUEUES, OWN_QUEUES, Kind
from stages.config.run_config import RunConfig
from stages.memory.estimate import (
    lasting_bytes,
    message_bytes,
    microbatch_activations,
    planned_on_gpu,
    recomputed_bytes,
    reduction_bytes,
    updated_bytes,
)
from stages.shape.partition import StageCut, owned_members, stage_parameters

GB = 1e9

OF_THE_DEVICE = ("communicators", "allocator")
"""Kinds of memory outside of tensors."""
_NEARLY = 1.05
"""Ranks hold at most so many times the blocks that one block's memory says."""
_TAKEN_BY = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.UPDATE: "update"}
_OF_ACTIONS = frozenset(("whole", "half", "slot", "recomputed", *_TAKEN_BY.values()))
"""Parts of a stage that an action takes or keeps; the others last."""


def planned_memory(config: RunConfig) -> list[dict[str, int]]:
    """Bytes of each rank of a run by kind, as in `Estimate.memory`."""
    return RankMemory(config, Found()).of_cut(own_cut_of(config))


class BlocksMemory:
    """Bytes of the ranks of a program under any cut, but for messages."""

    def __init__(self, config: RunConfig, found: Found, program: LayoutProgram | Pace) -> None:
        self.config, self._found, self.program = config, found, program
        data, on_gpu = config.parallel.data, planned_on_gpu(config)
        self._buffers = program.buffers(data_ranks=data, on_gpu=on_gpu)
        # Settings that decide how many bytes of a stage last, and how many a micro-batch takes.
        self._lasts = data, *delayed_settings(config)
        self._sizes = config.train.microbatch_size, config.train.recompute

    def may_fit(self, *, limit_gb: float) -> bool:
        """Whether all blocks may find room, by what a second block in each of its stages adds on a rank."""
        layers, room, stages = self.config.model.layers, 0.0, self.program.program.loss_stage + 1
        if layers == 1:
            return True
        cuts = layout_cuts(self.config, [1] * stages)
        for rank, held_by in enumerate(self.program.stages_of_rank):
            one = {stage: cuts[stage] for stage in held_by}
            two = {stage: _with_two_blocks(cut, layers) for stage, cut in one.items()}
            held, more = (sum(self.of_rank(rank, each).values()) for each in (one, two))
            blocks = sum(stage < stages for stage in held_by)
            room += blocks * max(0.0, 1 + (limit_gb * GB - held) / max(1.0, more - held))
        return room * _NEARLY >= layers

    def of_rank(self, rank: int, cuts: Mapping[int, StageCut]) -> dict[str, float]:
        """Bytes of a rank by kind, but for its messages, from its stages, ascending."""
        course = self.program.course
        parts = {stage: self._of_stage(stage, cut) for stage, cut in cuts.items()}
        beside = 0.0
        if any(self._buffers[stage] > 1 for stage in parts):
            # Updates run beside the actions, one at a time, on a stream with memory of its own.
            beside = max(of_stage["update"] for of_stage in parts.values())
        slots: list[tuple[int, int]] = []
        if any(of_stage["slot"] for of_stage in parts.values()):
            # CUDA graphs keep the memory of every micro-batch in flight, also while there are fewer.
            slots = [(max(map(sum, course.in_flight[stage])), 0) for stage in parts]
        pools = sum(slot * part["slot"] for (slot, _), part in zip(slots, parts.values(), strict=False))
        of_microbatch = [(of_stage["whole"], of_stage["half"]) for of_stage in parts.values()]
        most, fullest = (-1.0, 0.0, 0.0), 0.0
        for op, stage, counts in course.moments[rank]:
            activations: float = 0
            for (wholes, halves), (whole, half) in zip(slots or counts, of_microbatch, strict=True):
                activations += wholes * whole + halves * half
            recomputed: float = parts[stage]["recomputed"] if op is Op.BACKWARD else 0
            own = 0 if op is Op.UPDATE and beside else parts[stage][_TAKEN_BY[op]]
            temporary = pools + own + beside
            # Of equal ones always the same: moments come in any order.
            held = activations + recomputed + temporary, activations, recomputed
            if held > most:
                most, fullest = held, temporary
        kinds: dict[str, float] = {}
        for of_stage in parts.values():
            for kind, size in of_stage.items():
                if kind not in _OF_ACTIONS:
                    kinds[kind] = kinds.get(kind, 0) + size
        total, activations, recomputed = max(most, (0.0, 0.0, 0.0))
        return kinds | {
            "messages": 0,
            "reduction": self._reduction(frozenset(cuts.values())),
            "communicators": self._communicators(rank),
            "activations": activations,
            "recomputed": recomputed,
            "temporary": fullest,
            "allocator": allocator_bytes(total),
        }

    def _communicators(self, rank: int) -> int:
        if not planned_on_gpu(self.config):  # they are NCCL's
            return 0
        parallel = self.config.parallel
        return communicator_bytes(self.program.links[rank], stages=parallel.stages, data=parallel.data)

    def _reduction(self, cuts: frozenset[StageCut]) -> int:
        kinds = frozenset(kind_of(self.config, cut) for cut in cuts)
        key = ("reduction", kinds, self.config.parallel.data)
        return self._found.once(key, lambda: reduction_bytes(self.config, list(cuts)))

    def _of_stage(self, stage: int, cut: StageCut) -> dict[str, int]:
        """Bytes of a stage: by kind what lasts, `whole` and `half` of a micro-batch in flight, and what a
        forward, a backward and an update take for themselves."""
        course, kind = self.program.course, kind_of(self.config, cut)
        versions, mismatch, buffers = course.versions[stage], course.mismatch[stage], self._buffers[stage]

        def found() -> dict[str, int]:
            # More stages have these parts in common.
            config, once, mismatched = self.config, self._found.once, mismatch > 0
            updated = once(
                ("updated", kind, self._lasts, mismatch),
                lambda: updated_bytes(config, cut, mismatch=mismatch),
            )
            update = once(
                ("update", kind, self._lasts, mismatched),
                lambda: _of_update(config, cut, mismatched=mismatched),
            )
            lasting = lasting_bytes(config, cut, updated, versions=versions, gradient_buffers=buffers)
            taken = once(
                ("taken", kind, self._sizes, mismatched, delayed_settings(config)),
                lambda: _of_microbatch(config, cut, mismatched=mismatched),
            )
            return lasting | {"update": update} | taken

        key = ("stage", kind, versions, mismatch, buffers, self._lasts, self._sizes)
        return self._found.once(key, found)


def _of_microbatch(config: RunConfig, cut: StageCut, *, mismatched: bool) -> dict[str, int]:
    whole, half = microbatch_activations(config, cut)
    return {
        "recomputed": recomputed_bytes(config, cut),
        "whole": whole,
        "half": half,
        "forward": forward_bytes(config, cut),
        "backward": backward_bytes(config, cut, mismatched=mismatched),
        "slot": slot_bytes(config, cut),
    }


def _of_update(config: RunConfig, cut: StageCut, *, mismatched: bool) -> int:
    owned = owned_members(stage_parameters(config.model, cut), data_ranks=config.parallel.data)
    return max(update_bytes(config, of_rank, mismatched=mismatched) for of_rank in owned)


def _with_two_blocks(cut: StageCut, layers: int) -> StageCut:
    """The stage with two blocks, as if others had as many fewer; a shard of the head as it is."""
    if cut.head_rows is not None:
        return cut
    start = min(cut.halves.start, 2 * (layers - 2))
    return replace(cut, halves=range(start, start + 4))


class RankMemory(BlocksMemory):
    """Bytes of the ranks of a layout under any cut.

    Raises:
        schedules.ScheduleError: the schedule cannot be built for these numbers.
    """

    program: LayoutProgram

    def __init__(self, config: RunConfig, found: Found) -> None:
        super().__init__(config, found, found.program(config))
        self._message_sizes = tuple(message_bytes(config, kind) for kind in Kind)

    @property
    def messages(self) -> Sequence[int]:
        """Bytes of the messages that each rank holds at once."""
        return self.program.messages(self._message_sizes)

    @property
    def messages_at_most(self) -> Sequence[int]:
        """Upper bounds of `messages`, found sooner."""
        return self.program.messages_at_most(self._message_sizes)

    @property
    def needs_too_many_queues(self) -> bool:
        """Whether a run on GPUs would be refused, as a rank has more communicators than a GPU has queues."""
        most = max(communicators for communicators, _ in self.program.links)
        groups = (self.config.parallel.stages > 1) + (self.config.parallel.data > 1)
        return planned_on_gpu(self.config) and most + groups + OWN_QUEUES > MOST_QUEUES

    def of_cut(self, sizes: Sequence[float]) -> list[dict[str, int]]:
        """Bytes of each rank by kind, with so many blocks in each stage."""
        return [
            {kind: round(size) for kind, size in kinds.items()} | {"messages": held}
            for kinds, held in zip(self._without_messages(sizes), self.messages, strict=True)
        ]

    def fits(self, sizes: Sequence[float], *, limit_gb: float) -> bool:
        """Whether no rank needs more memory, 10^9 bytes, with so many blocks in each stage."""
        key = ("fits", self.program.geometry, *settings_of(self.config), *sizes, limit_gb)
        return self._found.once(key, lambda: self._fits(sizes, limit_gb=limit_gb))

    def _fits(self, sizes: Sequence[float], *, limit_gb: float) -> bool:
        held: list[float] = []
        for kinds in self._without_messages(sizes):
            held.append(sum(kinds.values()))
            if held[-1] > limit_gb * GB:
                return False

        def have_room(messages: Sequence[int]) -> bool:
            return all(size + more <= limit_gb * GB for size, more in zip(held, messages, strict=True))

        # Messages are counted where that decides.
        return have_room(self.messages_at_most) or have_room(self.messages)

    def _without_messages(self, sizes: Sequence[float]) -> Iterator[dict[str, float]]:
        cuts = layout_cuts(self.config, sizes)
        for rank, stages in enumerate(self.program.stages_of_rank):
            yield self.of_rank(rank, {stage: cuts[stage] for stage in stages})
