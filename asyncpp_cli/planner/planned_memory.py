"""Memory of each rank of a run, by kind, at its fullest moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from asyncpp_cli.planner.alike import Settings, alike_cuts, remembered
from asyncpp_cli.planner.kept import kept
from asyncpp_cli.planner.peak_memory import (
    allocator_bytes,
    backward_bytes,
    communicator_bytes,
    forward_bytes,
    slot_bytes,
    update_bytes,
)
from asyncpp_cli.planner.representative import (
    Represented,
    Shape,
    messages,
    messages_at_most,
    represented,
)
from asyncpp_cli.planner.stage_times import layout_cuts, own_cut_of
from optimizers import is_custom
from schedules import Op
from schedules.messages import MOST_QUEUES, OWN_QUEUES, Kind, RankLinks, links_of_ranks
from stages.comm.reduction_rounds import ROUND_BYTES, UNDER_WAY
from stages.config.run_config import RunConfig
from stages.config.segments import has_tied_shards, schedule_facts
from stages.memory.estimate import (
    lasting_bytes,
    message_bytes,
    microbatch_activations,
    planned_on_gpu,
    reduction_bytes,
)
from stages.shape.partition import (
    StageCut,
    owned_members,
    stage_parameters,
)

GB = 1e9

MOST = {"reduction": 2 * UNDER_WAY * ROUND_BYTES}
"""Upper bounds of kinds of memory, bytes."""

OF_THE_DEVICE = ("communicators", "allocator")
"""Kinds of memory outside of tensors."""


def planned_memory(config: RunConfig, sizes: Sequence[float] | None = None) -> list[dict[str, int]]:
    """Bytes of each rank by kind, as in `Estimate.memory`; `sizes`: of the stages, if not the run's own."""
    held = messages(Shape.of(config), message_sizes(config))
    return [
        kinds | {"messages": of_rank}
        for kinds, of_rank in zip(held_by_ranks(config, sizes or own_cut_of(config)), held, strict=True)
    ]


def fits(config: RunConfig, sizes: Sequence[float], *, limit_gb: float) -> bool:
    """Whether a run with so many blocks in each stage needs no more memory in any rank, 10^9 bytes."""
    held = [sum(kinds.values()) for kinds in held_by_ranks(config, sizes)]
    of_messages = Shape.of(config), message_sizes(config)

    def have_room(messages: Sequence[int]) -> bool:
        return all(size + more <= limit_gb * GB for size, more in zip(held, messages, strict=True))

    # Messages are counted where that decides.
    return max(held) <= limit_gb * GB and (
        have_room(messages_at_most(*of_messages)) or have_room(messages(*of_messages))
    )


def message_sizes(config: RunConfig) -> tuple[int, ...]:
    """Bytes of a message of each kind."""
    return tuple(message_bytes(config, kind) for kind in Kind)


def held_by_ranks(config: RunConfig, sizes: Sequence[float]) -> tuple[dict[str, int], ...]:
    """Bytes that each rank holds when it holds most, by kind; `messages` are 0."""
    return _held_by_ranks(_Layout(Settings(config), Shape.of(config), tuple(sizes), config))


def held_by_rank(parts: Mapping[int, Mapping[str, float]], run: Represented, rank: int) -> dict[str, float]:
    """Bytes of a rank by kind, from the parts of its stages, ascending, as `parts_of_stages` has them."""
    fullest, most = dict.fromkeys(("activations", "recomputed", "temporary"), 0.0), (0.0, 0.0, 0.0)
    beside = 0.0
    if any(run.buffers[stage] > 1 for stage in parts):
        # Updates run beside the actions, one at a time, on a stream with memory of its own.
        beside = max(of_stage["update"] for of_stage in parts.values())
    slots: list[tuple[int, int]] = []
    if any(of_stage["slot"] for of_stage in parts.values()):
        # CUDA graphs keep the memory of every micro-batch in flight, also while there are fewer.
        slots = [(max(map(sum, run.course.in_flight[stage])), 0) for stage in parts]
    pools = sum(slot * of_stage["slot"] for (slot, _), of_stage in zip(slots, parts.values(), strict=False))
    of_microbatch = [(of_stage["whole"], of_stage["half"]) for of_stage in parts.values()]
    for op, stage, counts in run.course.moments[rank]:
        activations: float = 0
        for (wholes, halves), (whole, half) in zip(slots or counts, of_microbatch, strict=True):
            activations += wholes * whole + halves * half
        recomputed = parts[stage]["recomputed"] if op is Op.BACKWARD else 0.0
        temporary = pools + (beside if op is Op.UPDATE and beside else parts[stage][_TAKEN_BY[op]] + beside)
        # Of equal ones always the same: moments come in any order.
        held = activations + recomputed + temporary, activations, recomputed
        if held > most:
            most = held
            fullest = {"activations": activations, "recomputed": recomputed, "temporary": temporary}
    kinds: dict[str, float] = {}
    for of_stage in parts.values():
        for kind, size in of_stage.items():
            if kind not in OF_ACTIONS:
                kinds[kind] = kinds.get(kind, 0) + size
    return kinds | fullest | {"allocator": allocator_bytes(sum(fullest.values()))}


_TAKEN_BY = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.UPDATE: "update"}
OF_ACTIONS = frozenset(("whole", "half", "slot", "recomputed", *_TAKEN_BY.values()))
"""Parts of a stage that an action takes or keeps; the others last."""


def parts_of_stages(config: RunConfig, sizes: Sequence[float]) -> list[dict[str, int]]:
    """Bytes of each stage: by kind what lasts, `whole` and `half` of a micro-batch in flight, and what a
    forward, a backward and an update take for themselves. Its first stage has what a rank needs once."""
    run = represented(Shape.of(config))
    settings, cuts, rank_of_stage = (
        Settings(config),
        alike_cuts(config, layout_cuts(config, sizes)),
        run.rank_of_stage,
    )
    parts: list[dict[str, int]] = []
    known: dict[tuple[int, ...], dict[str, int]] = {}  # most stages are alike
    stages_of, links = stages_of_ranks(rank_of_stage), links_of(config, rank_of_stage)
    for stage, cut in enumerate(cuts):
        rank = rank_of_stage[stage]
        of_rank = dict.fromkeys(("messages", "reduction", "communicators"), 0)
        if stage == stages_of[rank][0]:
            held = frozenset(cuts[own] for own in stages_of[rank])
            of_rank["reduction"] = _reduction_bytes(settings, held)
            if planned_on_gpu(config):  # NCCL's
                of_rank["communicators"] = communicator_bytes(
                    links[rank], stages=config.parallel.stages, data=config.parallel.data
                )
        facts = run.course.versions[stage], run.course.mismatch[stage], run.buffers[stage]
        if (own := known.get((id(cut), *facts))) is None:
            own = _lasting(settings, cut, *facts) | _of_an_action(settings, cut, facts[1] > 0)
            known[id(cut), *facts] = own
        parts.append(own | of_rank)
    return parts


@dataclass(frozen=True)
class _Layout:
    """A configuration, and the blocks in each of its stages, as key of a cache."""

    settings: Settings
    shape: Shape
    sizes: tuple[float, ...]
    config: RunConfig = field(compare=False, repr=False)


@remembered
def _held_by_ranks(layout: _Layout) -> tuple[dict[str, int], ...]:
    # Code of the user's own may have changed.
    return (_counted if is_custom(layout.config.optimizer.name) else _kept)(layout)


def _counted(layout: _Layout) -> tuple[dict[str, int], ...]:
    parts, run = parts_of_stages(layout.config, layout.sizes), represented(layout.shape)
    return tuple(
        {
            kind: round(size)
            for kind, size in held_by_rank({stage: parts[stage] for stage in stages}, run, rank).items()
        }
        for rank, stages in enumerate(stages_of_ranks(run.rank_of_stage))
    )


_kept = kept(_counted)


@lru_cache(maxsize=64)
def stages_of_ranks(rank_of_stage: tuple[int, ...]) -> list[list[int]]:
    """The stages of each rank, ascending."""
    stages: list[list[int]] = [[] for _ in range(max(rank_of_stage) + 1)]
    for stage, rank in enumerate(rank_of_stage):
        stages[rank].append(stage)
    return stages


@remembered
def _reduction_bytes(settings: Settings, cuts: frozenset[StageCut]) -> int:
    return reduction_bytes(settings.config, list(cuts))


@remembered
def _lasting(settings: Settings, cut: StageCut, *facts: int) -> dict[str, int]:
    return lasting_bytes(settings.config, cut, *facts)


@remembered
def _of_an_action(settings: Settings, cut: StageCut, mismatched: bool) -> dict[str, int]:
    """Bytes of a micro-batch in flight, and temporaries of the actions."""
    config = settings.config
    owned = owned_members(stage_parameters(config.model, cut), data_ranks=config.parallel.data)
    whole, half = microbatch_activations(config, cut)
    return {
        "whole": whole,
        "half": half,
        "forward": forward_bytes(config, cut),
        "backward": backward_bytes(config, cut, mismatched=mismatched),
        "slot": slot_bytes(config, cut),
        "update": max(update_bytes(config, of_rank, mismatched=mismatched) for of_rank in owned),
    }


def links_of(config: RunConfig, rank_of_stage: Sequence[int]) -> Sequence[RankLinks]:
    """The links of each rank of a layout, from the ranks of its stages without shards of the head."""
    ranks, blocks = config.parallel.stages, schedule_facts(config).stages
    shards = ranks * config.parallel.shard_head
    return links_of_ranks(
        (*rank_of_stage[:blocks], *range(shards)), head_shards=shards, tied_shards=has_tied_shards(config)
    )


def needs_too_many_queues(config: RunConfig, rank_of_stage: Sequence[int]) -> bool:
    """Whether a run on GPUs would be refused, as a rank has more communicators than its GPU has queues."""
    most = max(links.communicators for links in links_of(config, rank_of_stage))
    groups = (config.parallel.stages > 1) + (config.parallel.data > 1)
    return planned_on_gpu(config) and most + groups + OWN_QUEUES > MOST_QUEUES
