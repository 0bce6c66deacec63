"""PACI (arXiv 2606.07881) folded into a V: the order of `2bw-v`, one weight version and no stash.

Forward and backward both read the newest weights, and each stage updates on its own after every a backwards.
Between the forward and the backward of a micro-batch a stage performs as many other backwards as its order
says: k of them if the backward starts more than k and at most k + 1 periods after the forward. So at most
ceil(k / a) updates fall between them (`mismatch_bounds`). In `paci` k is p - 1 - s.
"""

from __future__ import annotations

from schedules.actions import NO_MICROBATCH, Action, Op, Program
from schedules.library.two_bw_v import block_of, rank_order
from schedules.library.v_block import EVEN_COSTS, BlockCosts, VBlock
from schedules.library.v_shape import placement
from schedules.schedule import Schedule
from schedules.segment import Segment


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
    return Program(
        schedule="paci-v",
        microbatches=segment.microbatches,
        update_interval=update_interval,
        updates_together=False,
        steps=segment.steps,
        first_step=segment.first_step,
        rank_of_stage=tuple(placement(segment.ranks)),
        initial_versions=(segment.first_microbatch // update_interval,),
        final_versions=(segment.end_microbatch // update_interval,),
        actions=tuple(
            _rank_actions(
                segment, block, stages=(rank, 2 * segment.ranks - 1 - rank), update_interval=update_interval
            )
            for rank in range(segment.ranks)
        ),
    )


def mismatch_bounds(block: VBlock, *, update_interval: int) -> list[int]:
    """Most updates of each stage between the forward and the backward of a micro-batch."""
    others = [
        -(-(backward - forward) // block.period) - 1
        for forward, backward in zip(block.forward, block.backward, strict=True)
    ]
    return [-(-count // update_interval) for count in others]


def _rank_actions(
    segment: Segment, block: VBlock, *, stages: tuple[int, int], update_interval: int
) -> tuple[Action, ...]:
    newest = dict.fromkeys(stages, segment.first_microbatch // update_interval)
    actions = []
    for stage, op, microbatch in rank_order(segment, block, stages=stages):
        actions.append(Action(stage, op, microbatch, newest[stage]))
        if op is Op.BACKWARD and (microbatch + 1) % update_interval == 0:
            newest[stage] += 1
            actions.append(Action(stage, Op.UPDATE, NO_MICROBATCH, newest[stage]))
    return tuple(actions)


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
