"""How FSDP shards a model (`torch.distributed.fsdp.fully_shard`, arXiv 2304.11277), and its memory.

A unit is a block; embedding, last norm and head are the root unit. Each parameter is sharded by its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapreplace
from math import prod

from asyncpp_cli.planner.memory import OF_THE_DEVICE
from asyncpp_cli.planner.peak_memory import allocator_bytes, communicator_bytes, forward_bytes
from optimizers import method_named
from optimizers.options import Value
from optimizers.state_size import state_values, step_values
from schedules.messages import RankLinks
from stages.config.run_config import RunConfig, changed, optimizer_options
from stages.config.segments import as_trained, shards_of
from stages.memory.estimate import (
    Sizes,
    head_chunk_rows,
    microbatch_activations,
    planned_on_gpu,
    recomputed_bytes,
    sizes,
)
from stages.shape.activations import INDEX_BYTES
from stages.shape.families import describe
from stages.shape.partition import StageCut
from stages.shape.spec import Parameter, PartSpec


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a model is sharded."""

    ranks: int
    """Ranks that each unit is sharded over."""
    replicas: int = 1
    """Groups of so many ranks; more than one is HSDP."""
    reshard: bool = True
    """Give a unit's weights back after its forward, and gather them again (`reshard_after_forward`)."""
    reduce_each: bool = True
    """Reduce gradients after every micro-batch; otherwise after the last (`set_requires_gradient_sync`), with
    whole gradients on every rank. Without `reshard`, weights then stay through the step, too."""

    def __str__(self) -> str:
        name = (
            f"fsdp over {self.ranks}" if self.replicas == 1 else f"hsdp over {self.ranks} x {self.replicas}"
        )
        kept = "" if self.reshard else ", weights kept" if self.reduce_each else ", weights kept for the step"
        return name + kept + ("" if self.reduce_each else ", gradients reduced once")

    def run_of(self, config: RunConfig) -> RunConfig:
        """The run that is sharded so.

        Args:
            config: with the micro-batches of a rank, and all ranks as `parallel.data`.
        """
        replicas = {"name": "fsdp"} if self.replicas == 1 else {"name": "hsdp", "replicas": self.replicas}
        kept = {"keep_weights": not self.reshard, "reduce_each": self.reduce_each}
        if config.schedule.microbatches == 1:
            del kept["reduce_each"]
        return changed(config, {f"schedule.{key}": value for key, value in (replicas | kept).items()})


def sharding_of(config: RunConfig) -> Sharding:
    """How a run under `fsdp` or `hsdp` shards its model."""
    processes, shards = config.parallel.stages * config.parallel.data, shards_of(config)
    return Sharding(
        ranks=shards,
        replicas=processes // shards,
        reshard=not config.schedule.keep_weights,
        reduce_each=config.schedule.reduce_each,
    )


def memory_of_run(config: RunConfig) -> dict[str, int]:
    """Bytes by kind of the fullest rank of a run under `fsdp` or `hsdp`, as `memory` counts them.

    Raises:
        schedules.ScheduleError: its processes cannot share the micro-batches.
    """
    kinds = memory(as_trained(config), sharding_of(config), lasting=True)
    return (
        kinds
        if planned_on_gpu(config)
        else {kind: kinds[kind] for kind in kinds if kind not in OF_THE_DEVICE}
    )


def by_rule(config: RunConfig) -> tuple[Sequence[Parameter], Sequence[Parameter]]:
    """Parameters that the optimizer updates value by value, and members of those that it needs whole, as Muon
    its matrices."""
    method = method_named(config.optimizer.name)
    elementwise: list[Parameter] = []
    whole: list[Parameter] = []
    for parameter in describe(config.model).whole():
        if method.rule(parameter.role.value).elementwise:
            elementwise.append(parameter)
        else:
            whole += parameter.members()
    return tuple(elementwise), tuple(whole)


def owned(parameters: Sequence[Parameter], ranks: int) -> Sequence[Parameter]:
    """The parameters of the rank that owns most, where parameters are not cut.

    Each goes to the rank with least so far, the largest first.
    """
    loads: list[tuple[int, int, list[Parameter]]] = [(0, rank, []) for rank in range(ranks)]
    for parameter in sorted(parameters, key=lambda parameter: -parameter.size):
        load, rank, of_rank = loads[0]
        heapreplace(loads, (load + parameter.size, rank, [*of_rank, parameter]))
    return max(loads)[2]


def memory(config: RunConfig, sharding: Sharding, *, lasting: bool = False) -> dict[str, int]:
    """Bytes of a rank at its fullest moment, by the kinds of the planner's estimates.

    `master` and `gradients` are shards; whole gradients that wait for a later micro-batch are `gradients`,
    too. `weights` are gathered: those of the root unit, of the block that is computed and of the next one,
    and in a forward the buffer that a unit came in, until the next is there. `temporary` has what an action
    takes and gives back, the input of the reduction under way, and the gradient of the head, whose unit is
    reduced last.

    Args:
        config: with the micro-batches of a rank.
        sharding: of the model.
        lasting: as a run of ours has it: shards of gradients stay, and who owns a matrix that the optimizer
            needs whole has it beside the shards, with its gradient. Otherwise as torch alone.
    """
    spec, size, ranks = describe(config.model), sizes(config), sharding.ranks
    tokens, several = config.train.microbatch_size * config.data.context, config.schedule.microbatches > 1
    blocks = [block.parameter_count for block in spec.blocks]
    shards = [_values(block.parameters, ranks) for block in spec.blocks]
    ends, head = spec.embedding.parameter_count + spec.head.parameter_count, spec.head.parameter_count
    root = (*spec.embedding.parameters, *spec.head.parameters)
    cut = StageCut(halves=range(2 * len(blocks)), has_embedding=True, has_head=True)
    kept, recomputed = microbatch_activations(config, cut)[0], recomputed_bytes(config, cut)
    held, indices = [tokens * _kept(config, block) for block in spec.blocks], tokens * INDEX_BYTES
    options = tuple(sorted(optimizer_options(config.optimizer).items()))
    owners, updated = ranks * sharding.replicas if lasting else ranks, by_rule(config)
    state, step = _optimizer_values(*updated, (ranks, owners), config.optimizer.name, options)
    master = sum(shards) + _values(root, ranks)
    waiting = several and not sharding.reduce_each
    # Shards of gradients of earlier micro-batches.
    earlier = master if lasting or (several and sharding.reduce_each) else 0
    # Values of the matrices that the rank with most of them owns beside its shards.
    matrices = sum(each.size for each in owned(updated[1], owners)) if lasting and owners > 1 else 0
    made, going = _gradient_bytes(size, lasting=lasting, waiting=waiting)

    def moment(
        weights: int, reduced: int, whole: int, activations: int, temporary: int, again: int = 0
    ) -> dict[str, int]:
        return {
            "weights": weights * size.replica,
            "gradients": (reduced + matrices + waiting * whole) * size.master,
            "activations": activations,
            "recomputed": again,
            "temporary": temporary,
        }

    logits = tokens * size.of(spec.head.passing) if head_chunk_rows(config) is None else 0
    last = ends + (blocks[-1] if sharding.reshard else sum(blocks))
    moments = [
        moment(2 * (ends + blocks[0]), earlier, sum(blocks) + ends, indices, 0),
        moment(last + sum(blocks[-2:]), earlier, sum(blocks) + ends, indices + sum(held[:-1]), 0),
        moment(last, earlier, sum(blocks) + ends, kept, max(logits, forward_bytes(config, cut))),
    ]
    for number, block in reversed([*enumerate(spec.blocks)]):
        others = ends + sum(blocks[:number][-1:] if sharding.reshard else blocks[:number])
        whole, reduced = sum(blocks[: number + 1]) + ends, earlier or sum(shards[number + 1 :])
        largest = max(parameter.size for parameter in block.parameters)
        passing = tokens * size.of(block.passing) + (head + largest) * made
        passing += sum(blocks[number + 1 :][:1]) * size.master
        below = indices + sum(held[:number])
        leaving = head * made + blocks[number] * going
        leaving += lasting * _summing(block.parameters, ranks) * size.master
        moments += [
            moment(others + blocks[number], reduced, whole, below + held[number], passing, recomputed),
            moment(others, reduced + (not lasting) * shards[number], whole, below, leaving),
        ]
    reduced = earlier or sum(shards)
    moments += [
        moment(ends, reduced, ends, 0, ends * (going - size.master) + blocks[0] * size.master),
        moment(0, reduced, ends, 0, ends * going + lasting * _summing(root, ranks) * size.master),
        moment(0, master, 0, 0, step * size.master),
    ]
    fullest = max(moments, key=lambda kinds: sum(kinds.values()))
    return {
        "master": (master + matrices) * size.master,
        "optimizer": state * size.master,
        **fullest,
        "communicators": communicator_bytes(RankLinks(0, 0), stages=1 + (sharding.replicas > 1), data=ranks),
        "allocator": allocator_bytes(sum(fullest.values()) - fullest["gradients"]),
    }


def _gradient_bytes(size: Sizes, *, lasting: bool, waiting: bool) -> tuple[int, int]:
    """Bytes of a value of a whole gradient, as a backward makes it (a run of ours adds to those that wait)
    and while it is reduced, with what is sent."""
    made = size.replica if not lasting else 0 if waiting else size.master
    return made, size.master + (0 if waiting else made)


def _summing(parameters: Sequence[Parameter], ranks: int) -> int:
    """Values that the reduction of a unit takes beside what is sent and what comes from others, in a run of
    ours: the sum, and the last gradient, which a variable of torch's `foreach_reduce` holds."""
    return 0 if ranks == 1 else _values(parameters, ranks) + parameters[-1].size


def _kept(config: RunConfig, block: PartSpec) -> int:
    """Bytes that a block keeps of a token."""
    size = sizes(config)
    if config.train.recompute == "full":
        return config.model.width * size.replica
    return size.of(block.kept if config.train.recompute == "none" else block.kept_selectively)


def _values(parameters: Iterable[Parameter], ranks: int) -> int:
    """Values of the first rank's shards; those of the last ranks are padded."""
    return sum(prod(_first_shard(parameter, ranks)) for parameter in parameters)


def _first_shard(parameter: Parameter, ranks: int) -> tuple[int, ...]:
    rows, *rest = parameter.shape
    return (-(-rows // ranks), *rest)


@lru_cache(maxsize=256)
def _optimizer_values(
    elementwise: Sequence[Parameter],
    whole: Sequence[Parameter],
    ranks: tuple[int, int],
    name: str,
    options: tuple[tuple[str, Value], ...],
) -> tuple[int, int]:
    """Values that an optimizer keeps on the rank with most of them, and those that a step takes.

    Args:
        elementwise: parameters that are updated by rows.
        whole: what is updated whole.
        ranks: that share the rows of `elementwise`, and that `whole` is shared out among.
        name: of the optimizer.
        options: of the optimizer.
    """
    holders, owners = ranks
    updated = [
        *((parameter.role, _first_shard(parameter, holders)) for parameter in elementwise),
        *((parameter.role, parameter.shape) for parameter in owned(whole, owners)),
    ]
    return state_values(name, updated, dict(options)), step_values(name, updated, dict(options))
