"""The number of gradient buffers that a stage needs. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from schedules import Op, Program
from schedules.actions import ADDING_NOTHING


def gradient_buffers(programs: Sequence[Program], *, data_ranks: int, on_gpu: bool) -> list[int]:
    """For each stage: 2 where backwards run before the previous gradient is complete or applied, else 1.

    An update is postponed where it waits for gradients of data ranks, for the norm of other ranks, or, on a
    GPU, for the copy of the verdict to the host.

    Args:
        programs: of the run's segments, one of each kind.
        data_ranks: number of data ranks.
        on_gpu: whether the run computes on GPUs.
    """
    updates_together = all(program.updates_together for program in programs)
    postponed = on_gpu or data_ranks > 1 or (updates_together and programs[0].num_ranks > 1)
    return [
        1 + ((postponed and _overlaps(programs, stage)) or _runs_ahead(programs, stage))
        for stage in range(programs[0].num_stages)
    ]


def _overlaps(programs: Sequence[Program], stage: int) -> bool:
    """Whether `stage` runs a backward between an update and the first reader of what it writes."""
    for program in programs:
        unread: int | None = None
        for action in program.stage_actions(stage):
            if action.op is Op.UPDATE:
                unread = action.version
            elif unread is not None and action.version >= unread:
                unread = None
            elif unread is not None and action.op not in ADDING_NOTHING:
                return True
    return False


def _runs_ahead(programs: Sequence[Program], stage: int) -> bool:
    """Whether `stage` gathers gradients of two steps at once, as a shard of a tied head may.

    Its matrix gets gradients as head and as embedding. Those as embedding come last, when those as head may
    already belong to the next step.
    """
    for program in programs:
        if not program.tied_shards or stage <= program.loss_stage:
            continue
        newest = program.first_step
        for action in program.stage_actions(stage):
            if action.op is Op.UPDATE:
                newest = action.version
            elif action.op is Op.HEAD_WEIGHT and action.microbatch // program.microbatches > newest:
                return True
    return False
