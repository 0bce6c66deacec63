"""A synchronous program in the CSV form of torch.distributed.pipelining, where a row is a rank's list.

A cell is an action: `2F0`, `1B3`, `0I4` or `0W4`. The form has one step, and no update: torch repeats it.
"""

from __future__ import annotations

import csv
import io

from schedules.actions import Op, Program, ScheduleError


def to_csv(program: Program) -> str:
    """One step of a synchronous program as torch's CSV.

    Raises:
        ScheduleError: `program` is not synchronous, or its head is in shards: torch has no form for versions,
            updates and shards.
    """
    if program.head_shards:
        raise ScheduleError("torch's CSV has no shards of the head; accepted: without --shard-head")
    update = Op.UPDATE
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    for actions in program.actions:
        computations = [action for action in actions if action.op is not update]
        steps = [action.microbatch // program.microbatches for action in computations]
        for action, step, before in zip(computations, steps, [program.first_step, *steps], strict=False):
            if step < before or action.version != step or program.update_interval != program.microbatches:
                raise ScheduleError(
                    f"torch's CSV has synchronous schedules only, and {program.schedule} is none: "
                    f"{action} of step {step} is not performed with that step's weights alone"
                )
        writer.writerow(
            f"{action.stage}{action.op.value}{action.microbatch % program.microbatches}"
            for action, step in zip(computations, steps, strict=True)
            if step == program.first_step
        )
    return lines.getvalue()
