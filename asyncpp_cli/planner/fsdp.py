"""Steps of fully sharded data parallelism in closed form: FSDP, and HSDP, which shards within a node and adds
the gradients of nodes.

Compute and exchanges run beside each other, exchanges one after another. While a unit (`sharding`) is
computed, the weights of the next one are gathered, and the gradients of the one before are reduced. Torch
holds one unit that was gathered ahead and the input of one reduction, so the next unit begins when all of
that is done. So a step is a sum of `beside` over its units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from operator import add, attrgetter, itemgetter

from asyncpp_cli.planner.costs.links import NOTHING, Exchange, Links
from asyncpp_cli.planner.costs.roofline import PartTimes, Roofline
from asyncpp_cli.planner.layouts import LARGEST_MICROBATCH, RECOMPUTE, Variant, layout
from asyncpp_cli.planner.memory import GB
from asyncpp_cli.planner.sharding import Sharding, by_rule, memory_of_run, owned, sharding_of
from asyncpp_cli.planner.shared import CostModel, recomputing
from asyncpp_cli.planner.stage_times import StepTime
from stages.config.run_config import RunConfig, tokens_per_step
from stages.config.segments import as_trained
from stages.memory.estimate import sizes
from stages.shape.families import describe


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Seconds of computing a micro-batch in a unit, and the exchanges of its weights and gradients."""

    forward: float
    backward: float
    """With recomputation."""
    gather: Exchange = NOTHING
    reduce: Exchange = NOTHING


@dataclass(frozen=True, kw_only=True)
class Units:
    """The units of a model. The root unit's exchanges are those of `embedding`, `head` has none."""

    embedding: Unit
    blocks: Sequence[Unit]
    head: Unit


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """A run under FSDP or HSDP, as estimated."""

    config: RunConfig
    """The run, whose schedule is `fsdp` or `hsdp`."""
    sharding: Sharding
    seconds: float
    """Seconds of a step."""
    alone: float
    """Seconds of a step if exchanges took no time."""
    cut: tuple[float, ...] = ()
    """None: it has no stages."""
    rank_of_stage: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The layout's name in tables."""
        kind = "fsdp" if self.sharding.replicas == 1 else "hsdp"
        return kind + ", weights kept" * (not self.sharding.reshard)

    @property
    def place(self) -> str:
        """The name and the ranks."""
        return str(self.sharding)

    @property
    def step(self) -> StepTime:
        """Time of a step; its bubble is what exchanges cost."""
        return StepTime(seconds=self.seconds, bubble=self.lost)

    @property
    def delay(self) -> int:
        """It is synchronous."""
        return 0

    @property
    def memory(self) -> tuple[dict[str, int], ...]:
        """Bytes by kind of the fullest rank alone; the others are alike. They are counted each time, which
        takes longer than to estimate the step."""
        return (memory_of_run(self.config),)

    @property
    def memory_gb(self) -> float:
        """10^9 bytes."""
        return sum(memory_of_run(self.config).values()) / GB

    @property
    def rank_gb(self) -> list[float]:
        """Memory of the fullest rank alone, 10^9 bytes; the others are alike."""
        return [self.memory_gb]

    def exceeds(self, limit_gb: float) -> bool:
        """Whether a rank needs more memory, 10^9 bytes."""
        return self.memory_gb > limit_gb

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        return tokens_per_step(self.config) / self.seconds

    @property
    def lost(self) -> float:
        """Share of the step that exchanges cost."""
        return 1 - self.alone / self.seconds

    @property
    def losses(self) -> dict[str, float]:
        """Shares of the step that it loses, as a pipeline's has them."""
        return {"network": self.lost}


def best_sharded(
    base: RunConfig, *, gpus: int, tokens_per_step: int, costs: CostModel, limit_gb: float
) -> list[Sharded]:
    """The best layout of FSDP and of HSDP that fit, the faster one first; none where there is one GPU, or
    links are not known, as with measured times."""
    if gpus == 1 or not isinstance(costs, Roofline):
        return []
    layouts = fsdp_layouts(
        base, gpus=gpus, tokens_per_step=tokens_per_step, costs=costs, links=Links.of(costs.device)
    )
    first: dict[int, Sharded] = {}
    seconds_of = attrgetter("seconds")
    for _, alike in groupby(sorted(layouts, key=seconds_of), key=seconds_of):
        # Memory is counted where it decides.
        others = [(each.memory_gb, each) for each in alike if each.sharding.replicas not in first]
        for held, each in sorted(others, key=itemgetter(0)):
            if held <= limit_gb:
                first.setdefault(each.sharding.replicas, each)
    return list(first.values())


def fsdp_layouts(
    base: RunConfig,
    *,
    gpus: int,
    tokens_per_step: int,
    costs: CostModel,
    links: Links,
    recompute: Collection[str] = RECOMPUTE,
) -> list[Sharded]:
    """FSDP over all GPUs and HSDP over those of a node, with micro-batches of every power of two of sequences
    that divides a rank's. Empty if ranks cannot have equally many sequences.

    Args:
        base: the run: its model, context, optimizer and precision.
        gpus: ranks, each with micro-batches of its own.
        tokens_per_step: of all ranks.
        costs: of the model's parts.
        links: of the GPUs.
        recompute: values of `train.recompute` to try.
    """
    sequences, remainder = divmod(tokens_per_step, base.data.context * gpus)
    groups = [(gpus, 1)]
    if gpus > links.node > 1 and gpus % links.node == 0:
        groups.append((links.node, gpus // links.node))
    updates = {ranks: update_seconds(base, ranks, costs, links) for ranks, _ in groups}
    found = []
    for size in (2**power for power in range(LARGEST_MICROBATCH.bit_length())):
        if remainder or not sequences or sequences % size:
            break
        several = (True, False) if sequences > size else (True,)
        for again in recompute:
            counts = {"microbatches": sequences // size, "size": size}
            config = layout(base, Variant("1f1b"), stages=1, data=gpus, recompute=again, **counts)
            for (ranks, replicas), reshard, each in product(groups, (True, False), several):
                how = Sharding(ranks=ranks, replicas=replicas, reshard=reshard, reduce_each=each)
                found.append(sharded(config, how, costs, links, update=updates[ranks]))
    return found


def sharded_run(config: RunConfig, costs: Roofline) -> Sharded:
    """Estimate a run under `fsdp` or `hsdp`.

    Raises:
        schedules.ScheduleError: its processes cannot share the micro-batches.
    """
    trained, how, links = as_trained(config), sharding_of(config), Links.of(costs.device)
    update = update_seconds(trained, how.ranks, costs, links)
    return replace(sharded(trained, how, costs, links, update=update), config=config)


def sharded(
    config: RunConfig,
    sharding: Sharding,
    costs: CostModel,
    links: Links,
    *,
    update: tuple[float, float],
    gradient_bytes: int | None = None,
) -> Sharded:
    """Estimate a step.

    Args:
        config: with the micro-batches of a rank.
        sharding: of the model.
        costs: of its parts.
        links: of the GPUs.
        update: as `update_seconds` has it.
        gradient_bytes: of a value of a gradient while it is reduced; None: of the master weights, as in
            pipelines.
    """
    units = units_of(config, sharding, costs, links, gradient_bytes=gradient_bytes or sizes(config).master)
    microbatches, parts = config.schedule.microbatches, (units.embedding, *units.blocks, units.head)
    return Sharded(
        config=sharding.run_of(config),
        sharding=sharding,
        seconds=step_seconds(units, sharding, microbatches=microbatches) + sum(update),
        alone=microbatches * sum(part.forward + part.backward for part in parts) + update[0],
    )


def units_of(
    config: RunConfig, sharding: Sharding, costs: CostModel, links: Links, *, gradient_bytes: int
) -> Units:
    """The units of a run; arguments are those of `sharded`."""
    spec, width, times = describe(config.model), sizes(config).replica, costs.parts(config)

    def unit(part: PartTimes, values: int, recomputed: float = 0.0) -> Unit:
        size = gradient_bytes * values
        # What is reduced per micro-batch is summed in shards.
        alone = sharding.reduce_each or config.schedule.microbatches == 1
        return Unit(
            forward=part.forward,
            backward=part.backward - part.summed * alone + recomputed,
            gather=links.ring(width * values, sharding.ranks),
            reduce=links.ring(size, sharding.ranks)
            + links.all_reduce(size / sharding.ranks, sharding.replicas),
        )

    return Units(
        embedding=unit(times.embedding, spec.embedding.parameter_count + spec.head.parameter_count),
        blocks=[
            unit(
                part,
                block.parameter_count,
                recomputing(config, part),
            )
            for part, block in zip(times.blocks, spec.blocks, strict=True)
        ],
        head=unit(times.head, 0),
    )


def step_seconds(units: Units, sharding: Sharding, *, microbatches: int) -> float:
    """Seconds of a step without its update."""
    stay = not sharding.reshard and not sharding.reduce_each
    alike = Counter(
        (number == 0 or not stay, sharding.reduce_each or number == microbatches - 1)
        for number in range(microbatches)
    )
    return sum(
        count * microbatch_seconds(units, gathers=gathers, regathers=sharding.reshard, reduces=reduces)
        for (gathers, reduces), count in alike.items()
    )


def microbatch_seconds(units: Units, *, gathers: bool, regathers: bool, reduces: bool) -> float:
    """Seconds of a micro-batch.

    Args:
        units: of the model.
        gathers: whether weights are gathered for the forward.
        regathers: whether those of blocks are gathered again for the backward.
        reduces: whether gradients are reduced.
    """
    blocks, back = units.blocks, units.blocks[::-1]
    forward = [units.embedding.forward, *(block.forward for block in blocks), units.head.forward]
    ahead = [*(block.gather if gathers else NOTHING for block in blocks), NOTHING, NOTHING]
    backward = [units.head.backward, *(block.backward for block in back), units.embedding.backward]
    again = [*(block.gather if regathers else NOTHING for block in back), NOTHING, NOTHING]
    behind = [NOTHING, NOTHING, *(block.reduce if reduces else NOTHING for block in back)]
    return (
        units.embedding.gather.seconds * gathers
        + sum(map(beside, forward, ahead))
        + sum(map(beside, backward, map(add, again, behind)))
        + units.embedding.reduce.seconds * reduces
    )


def beside(compute: float, exchange: Exchange) -> float:
    """Seconds until both are done, if they begin together."""
    return max(exchange.seconds, compute + exchange.lost)


def update_seconds(config: RunConfig, ranks: int, costs: CostModel, links: Links) -> tuple[float, float]:
    """Seconds that an optimizer step over so many shards computes, and those that it exchanges.

    What is updated value by value is updated in shards. Each matrix that is needed whole goes to one owner,
    in the type of the weights, and its update back, as in Dion (arXiv 2504.05295), all of them at once; or
    every rank gathers and updates all, where that is faster.
    """
    elementwise, whole = by_rule(config)
    shards = costs.update(config, elementwise) / ranks
    if not whole:
        return shards, 0.0
    size = sizes(config).replica * sum(parameter.size for parameter in whole)
    sent = links.all_to_all(size / ranks, ranks)
    ways = [
        (shards + costs.update(config, owned(whole, ranks)), 2 * sent),
        (shards + costs.update(config, whole), links.ring(size, ranks).seconds),
    ]
    return min(ways, key=sum)
