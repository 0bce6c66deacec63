"""How evenly a model is cut into stages: by multiply-adds, or by the times that a run measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.runs.experiment_folder import run_at
from asyncpp_cli.schedule_tools.programs import measured_run
from schedules import options_taken
from schedules.costs import RankTimes
from schedules.library.v_block import whole_costs
from stages.config.run_config import RunConfig, changed
from stages.config.segments import schedule_facts
from stages.shape.families import describe
from stages.shape.partition import (
    RankWork,
    StageCut,
    cut_model,
    cut_of,
    cut_over_ranks,
    stage_cost,
    stage_cuts,
    with_head_shards,
)

STAGES = (4, 8, 16)
"""Numbers of stages that are compared."""


class Balance(NamedTuple):
    """The most even cuts into a number of stages, one on each rank."""

    stages: int
    whole: float
    """Efficiency with stages of whole blocks: mean multiply-adds of a stage over those of the largest."""
    within: float
    """Efficiency where a stage may begin and end within a block, and the last may have the head alone."""
    cut: list[float]
    """The cut of `within`, as in `parallel.cut`."""
    sharded: float
    """Efficiency of stages cut within blocks, with the head in shards on all ranks."""
    sharded_cut: list[float]
    """The cut of `sharded`, as in `parallel.cut`."""


def balances(config: RunConfig) -> Iterator[Balance]:
    """The cuts of a run's model into each of `STAGES`."""
    context = config.data.context
    for stages in STAGES:
        if stages <= config.model.layers:
            whole = cut_model(config.model, stages=stages, context=context)
            within = cut_model(config.model, stages=stages, context=context, within_blocks=True)
            cuts = cut_model(config.model, stages=stages, context=context, within_blocks=True, has_head=False)
            line = {"parallel.stages": stages, "schedule.name": "1f1b", "schedule.chunks": 1}
            in_a_line = changed(config, line)
            sharded = efficiency(config, with_head_shards(in_a_line, cuts))
            sharded_cut = [cut.size for cut in cuts]
            yield Balance(
                stages,
                efficiency(config, whole),
                efficiency(config, within),
                [cut.size for cut in within],
                sharded,
                sharded_cut,
            )


def efficiency(config: RunConfig, cuts: list[StageCut]) -> float:
    """Mean multiply-adds of a rank with one stage, and perhaps a shard of the head, over those of the
    largest, in 0..1."""
    loads = _loads(config, [cut for cut in cuts if cut.head_rows is None])
    spec, context = describe(config.model), config.data.context
    for rank, shard in enumerate(cut for cut in cuts if cut.head_rows is not None):
        share = len(shard.head_rows or ()) / config.model.vocab_size
        loads[rank] += round(share * spec.head.forward_multiply_adds(context=context))
    return sum(loads) / len(loads) / max(loads)


def _loads(config: RunConfig, cuts: Sequence[StageCut]) -> list[int]:
    """Multiply-adds of each stage for a token."""
    spec, context = describe(config.model), config.data.context
    return [
        sum(spec.halves[half].forward_multiply_adds(context=context) for half in cut.halves)
        + cut.has_head * spec.head.forward_multiply_adds(context=context)
        for cut in cuts
    ]


class MeasuredBalance(NamedTuple):
    """The times of a run's ranks, and the cut that evens them out."""

    seconds: list[float]
    """What each rank computes for a micro-batch, as measured."""
    speed: list[float]
    """Multiply-adds per second of each rank over the mean of all."""
    cut: list[float]
    """The run's cut, blocks of each stage."""
    even_cut: list[float]
    """The cut whose slowest rank is fastest, if each rank keeps its speed."""
    expected: list[float]
    """What each rank computes for a micro-batch under that cut, seconds."""
    costs: list[int] | None
    """`schedule.costs` in the proportions measured; None where the schedule does not take them."""

    @property
    def efficiency(self) -> float:
        """Mean time of a rank over the largest, in 0..1."""
        return sum(self.seconds) / len(self.seconds) / max(self.seconds)

    @property
    def expected_efficiency(self) -> float:
        """Expected mean time of a rank over the largest under `even_cut`, in 0..1."""
        return sum(self.expected) / len(self.expected) / max(self.expected)

    def record(self) -> dict[str, Any]:
        """The numbers, for JSON."""
        shares = {"efficiency": self.efficiency, "expected_efficiency": self.expected_efficiency}
        return self._asdict() | shares


def balances_of_run(folder: Path) -> tuple[str, MeasuredBalance]:
    """The id of a run, and how even its ranks were.

    Raises:
        UserError: what its parts cost is unknown.
    """
    run = run_at(folder)
    config = run.config()
    if config.model.factory is not None:
        raise UserError(f"{folder}: model.factory: what a part of a user's own model costs is unknown")
    if config.parallel.shard_head:
        raise UserError(f"{folder}: parallel.shard_head: shards of the head are not planned for")
    return run.id, measured_balance(config, measured_run(run.folder)[1])


def measured_balance(config: RunConfig, times: RankTimes) -> MeasuredBalance:
    """The cut for ranks that are as fast as a run measured.

    A rank's speed is that of all that it computes: a head that takes longer for a multiply-add than a block
    counts as a slower rank, so the proposal may be measured and evened out again.

    Args:
        config: of the run.
        times: as it measured them.
    """
    context, cuts, head_stage = config.data.context, cut_of(config), len(cut_of(config)) - 1
    rank_of_stage = schedule_facts(config).placement or tuple(range(len(cuts)))
    ranks = len(times.forward)
    loads = [0.0] * ranks
    for rank, load in zip(rank_of_stage, _loads(config, cuts), strict=True):
        loads[rank] += load
    by_op = (times.forward, times.input_half, times.weight_half)
    seconds = [sum(of_rank) for of_rank in zip(*by_op, strict=True)]
    pace = [took / load for took, load in zip(seconds, loads, strict=True)]
    spec = describe(config.model)
    halves = [half.forward_multiply_adds(context=context) for half in spec.halves]
    blocks = [sum(halves[first : first + 2]) for first in range(0, len(halves), 2)]
    head = spec.head.forward_multiply_adds(context=context)

    def cost(stage: int, size: int, within: bool) -> float:
        load = stage_cost(blocks, halves, stage, size, within=within) + head * (stage == head_stage)
        return load * pace[rank_of_stage[stage]]

    divides_blocks = tuple(rank_of_stage[:ranks]) == tuple(range(ranks))
    work = RankWork(rank_of_stage, cost, together=2, may_be_empty=divides_blocks)
    sizes = cut_over_ranks(items=len(halves), work=work, fits=None, step=1 if divides_blocks else 2)
    assert sizes is not None, "the run's own cut is one"
    even = stage_cuts([size / 2 for size in sizes])
    expected = [0.0] * ranks
    for rank, load in zip(rank_of_stage, _loads(config, even), strict=True):
        expected[rank] += load * pace[rank]
    takes_costs = "costs" in options_taken(config.schedule.name)
    return MeasuredBalance(
        seconds=seconds,
        speed=[sum(pace) / ranks / of_rank for of_rank in pace],
        cut=[cut.size for cut in cuts],
        even_cut=[cut.size for cut in even],
        expected=expected,
        costs=list(whole_costs(*map(sum, by_op))) if takes_costs else None,
    )
