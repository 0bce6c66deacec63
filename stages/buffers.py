"""How many gradient buffers a stage needs. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from schedules import FAMILY, Op, Program


def gradient_buffers(schedule: str, programs: Sequence[Program], *, data_ranks: int) -> list[int]:
    """For each stage 2 where backwards run before the gradient of an update has been applied, else 1.

    Only an update that awaits others is put off: gradients of other data ranks, or the norm of other stages.

    Args:
        schedule: name of the run's.
        programs: of its segments, one of each kind.
        data_ranks: of each stage.
    """
    common_step = FAMILY[schedule].default_interval is None
    awaits = data_ranks > 1 or (common_step and programs[0].num_ranks > 1)
    return [1 + (awaits and _overlaps(programs, stage)) for stage in range(programs[0].num_stages)]


def _overlaps(programs: Sequence[Program], stage: int) -> bool:
    """Whether `stage` runs a backward between an update and the first reader of what it writes."""
    for program in programs:
        unread: int | None = None
        for action in program.stage_actions(stage):
            if action.op is Op.UPDATE:
                unread = action.version
            elif unread is not None and action.version >= unread:
                unread = None
            elif unread is not None and action.op is not Op.FORWARD:
                return True
    return False
