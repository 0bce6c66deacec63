"""PACI (arXiv 2606.07881) folded into a V: the order of `2bw-v`, one weight version and no stash.

Forward and backward both read the newest weights, and each stage updates on its own after every a backwards.
Between the forward and the backward of a micro-batch a stage performs as many other backwards as its order
says: k of them if the backward starts more than k and at most k + 1 periods after the forward. So at most
ceil(k / a) updates fall between them (`mismatch_bounds`). In `paci` k is p - 1 - s.
"""

from __future__ import annotations

from schedules.actions import Program
from schedules.library.two_bw_v import block_of, rank_orders
from schedules.library.v_block import EVEN_COSTS, BlockCosts, VBlock
from schedules.library.v_shape import placement
from schedules.schedule import Schedule
from schedules.segment import Segment, run_through


def paci_v(
    segment: Segment, *, update_interval: int, ahead: int = 1, costs: BlockCosts = EVEN_COSTS
) -> Program:
    """Rank r holds stages r and 2 p - 1 - r, and one version of their weights.

    Args:
        segment: The part of the run.
        update_interval: The paper's accumulation a.
        ahead: 1: messages arrive when they are needed; a: each has a - 1 sixths of a micro-batch's time.
        costs: At which no rank is ever idle.
    """
    block = block_of(ranks=segment.ranks, ahead=ahead, split=False, costs=costs)
    return run_through(
        segment,
        rank_orders(segment, block),
        schedule="paci-v",
        rank_of_stage=placement(segment.ranks),
        update_interval=update_interval,
        updates_together=False,
        stashed=False,
        read=lambda microbatch, newest: newest,
        initial_versions=(segment.first_microbatch // update_interval,),
        final_versions=(segment.end_microbatch // update_interval,),
    )


def mismatch_bounds(block: VBlock, *, update_interval: int) -> list[int]:
    """Most updates of each stage between the forward and the backward of a micro-batch."""
    others = [
        -(-(backward - forward) // block.period) - 1
        for forward, backward in zip(block.forward, block.backward, strict=True)
    ]
    return [-(-count // update_interval) for count in others]


PACI_V = Schedule(
    name="paci-v",
    description="paci in the order of 2bw-v: one version, no stash, activations balanced",
    program=paci_v,
    synchronous=False,
    stages_per_rank=2,
    placement=placement,
    synchronous_start="v-min",
    default_interval=lambda microbatches: microbatches,
)
