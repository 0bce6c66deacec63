"""2BW folded into a V: never flushed, the same delay at every stage, and activations balanced over the ranks.

Versions are those of `2bw`: step t computes with W(max(t - d, 0)). What differs is who holds which stage
(rank r holds stages r and 2 p - 1 - r) and the order: that of a periodic block without idle time (`v_block`).
Over its share of the model, the fullest rank holds the activations of about 2 p / 3 micro-batches with whole
backwards and p / 3 with split ones; 2bw's first rank holds p.
"""

from __future__ import annotations

from collections.abc import Iterator

from schedules.actions import Op, Program, ScheduleError
from schedules.library.v_block import EVEN_COSTS, BlockCosts, VBlock, v_block
from schedules.library.v_shape import placement
from schedules.schedule import Schedule
from schedules.segment import Segment, legal_delay, run_through


def block_of(*, ranks: int, ahead: int, split: bool, costs: BlockCosts = EVEN_COSTS) -> VBlock:
    """The block at these costs, with at least `ahead - 1` sixths of a micro-batch's time for each message."""
    backward, weight = costs.input_half, costs.weight_half
    if not split:
        backward, weight = backward + weight, 0
    message = -(-(ahead - 1) * sum(costs) // 3)  # a rank computes two stages
    return v_block(ranks=ranks, forward=costs.forward, backward=backward, weight=weight, message=message)


def lead(*, ranks: int, ahead: int = 1, split: bool = False, costs: BlockCosts = EVEN_COSTS) -> int:
    """A delay of d needs d m >= L - 1 where the activations of a stage live L periods at most.

    So the update of step t - d - 1 stands before step t's first forward.
    """
    block = block_of(ranks=ranks, ahead=ahead, split=split, costs=costs)
    return -(-(max(block.lifetimes) - block.period) // block.period)


def least_microbatches(block: VBlock) -> int:
    """Micro-batches a step so that no rank's far stage ends a step before its near stage has ended the last.

    An update waits for the gradient norm of all stages. Were the far stage a whole step ahead, its next
    update would stand before the near stage's, and wait for ever.
    """
    last_half = block.backward if block.weight is None else block.weight
    lags = [near - far for near, far in zip(last_half, reversed(last_half), strict=True)]
    return max(lags) // block.period + 1


def two_bw_v(
    segment: Segment,
    *,
    ahead: int = 1,
    costs: BlockCosts = EVEN_COSTS,
    delay: int | None = None,
    delayed_from: int = 0,
    split: bool = False,
) -> Program:
    """Rank r holds stages r and 2 p - 1 - r, and `delay + 1` versions of their weights.

    Args:
        segment: The part of the run.
        ahead: 1: messages arrive when they are needed; a: each has a - 1 sixths of a micro-batch's time.
        costs: At which no rank is ever idle.
        delay: Updates between the weights of a gradient and those it is applied to; None: the smallest
            legal one.
        delayed_from: First step under delay. The steps before it were synchronous and left one version.
        split: Whether backwards are split into an input half and a weight half.

    Raises:
        ScheduleError: `delay` is smaller than the order allows, or a step has too few micro-batches.
    """
    block = block_of(ranks=segment.ranks, ahead=ahead, split=split, costs=costs)
    least = least_microbatches(block)
    if segment.microbatches < least:
        raise ScheduleError(
            f"2bw-v on {segment.ranks} ranks needs at least {least} micro-batches per step, and "
            f"{segment.microbatches} are asked for"
        )
    delay = legal_delay(
        segment,
        schedule="2bw-v",
        delay=delay,
        lead=lead(ranks=segment.ranks, ahead=ahead, split=split, costs=costs),
    )
    end_step = segment.first_step + segment.steps

    def version_read(step: int) -> int:
        return max(step - delay, delayed_from)

    return run_through(
        segment,
        rank_orders(segment, block),
        schedule="2bw-v",
        rank_of_stage=placement(segment.ranks),
        update_interval=segment.microbatches,
        stashed=True,
        read=lambda microbatch, newest: version_read(microbatch // segment.microbatches),
        initial_versions=tuple(range(version_read(segment.first_step), segment.first_step + 1)),
        final_versions=tuple(range(version_read(end_step), end_step + 1)),
    )


def rank_orders(segment: Segment, block: VBlock) -> Iterator[list[tuple[int, Op, int]]]:
    """For each rank, the order of its actions, updates aside, where every micro-batch repeats the block."""
    for rank in range(segment.ranks):
        starts = []
        for stage in (rank, 2 * segment.ranks - 1 - rank):
            starts.append((block.forward[stage], stage, Op.FORWARD))
            if block.weight is None:
                starts.append((block.backward[stage], stage, Op.BACKWARD))
            else:
                starts.append((block.backward[stage], stage, Op.BACKWARD_INPUT))
                starts.append((block.weight[stage], stage, Op.BACKWARD_WEIGHT))
        in_order = sorted(
            (start + block.period * microbatch, stage, op, microbatch)
            for start, stage, op in starts
            for microbatch in range(segment.first_microbatch, segment.end_microbatch)
        )
        yield [(stage, op, microbatch) for _, stage, op, microbatch in in_order]


TWO_BW_V = Schedule(
    name="2bw-v",
    description="2bw with two stages per rank in a V: activations balanced, fewer if split",
    program=two_bw_v,
    synchronous=False,
    stages_per_rank=2,
    ends_together=True,
    placement=placement,
    synchronous_start="v-min",
    lead=lead,
)
