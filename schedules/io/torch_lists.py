"""Converts schedules of torch.distributed.pipelining to programs and back. In its CSV a row is a rank's list.

A cell is an action: `2F0`, `1B3`, `0I4` or `0W4`, two of them performed together are `(0F5;3B2)OVERLAP_F_B`,
and an empty cell is a wait. Cells that only move or shard data (SEND_F, WAIT_SEND_F, RECV_B, UNSHARD, ...)
follow from the others and are ignored. A list holds one step and no update: a program repeats it, and every
stage updates after its last backward.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

from schedules.actions import Op, Program, ScheduleError
from schedules.library.one_f_one_b import one_f_one_b
from schedules.segment import Segment, Slot, flushed
from schedules.verify import verify

_COMPUTATION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_TOGETHER = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_MOVEMENT = re.compile(r"\d+((?:WAIT_)?(?:SEND_[FB]|REDUCE_GRAD)|RECV_[FB]|UNSHARD|RESHARD)\d*")


def from_csv(text: str, *, name: str, steps: int, first_step: int = 0) -> Program:
    """The synchronous program that performs the list `text` in every step.

    Args:
        text: Content of a CSV file.
        name: Name of the program, and of the list in errors.
        steps: Steps of the segment.
        first_step: Its first step.

    Raises:
        ScheduleError: The list is incomplete or invalid; the message names the row and the cell.
    """
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ScheduleError(f"{name}: is not CSV ({error})") from error
    return from_lists(rows, name=name, steps=steps, first_step=first_step)


def from_lists(rows: Sequence[Sequence[object]], *, name: str, steps: int, first_step: int = 0) -> Program:
    """As `from_csv`, from the lists themselves: each rank's actions (as they print) and None."""
    order = [_parse_row(row, name=name, rank=rank) for rank, row in enumerate(rows)]
    slots = [slot for rank_order in order for slot in rank_order]
    if not slots:
        raise ScheduleError(f"{name}: has no action")
    segment = Segment(
        ranks=len(order),
        microbatches=1 + max(slot.microbatch for slot in slots),
        steps=steps,
        first_step=first_step,
    )
    rank_of_stage = _rank_of_stage(order, name=name)
    _refuse_gaps(set(slots), rank_of_stage, microbatches=segment.microbatches, name=name)
    program = flushed(segment, schedule=name, rank_of_stage=rank_of_stage, order=order)
    try:
        verify(program)
    except ScheduleError as error:
        raise ScheduleError("\n".join(f"{name}: {problem}" for problem in str(error).splitlines())) from None
    return program


def _parse_row(row: Sequence[object], *, name: str, rank: int) -> list[Slot]:
    slots = []
    first_cell: dict[Slot, int] = {}
    for column, cell in enumerate(row, start=1):
        where = f"{name}, row {rank + 1} (rank {rank}), cell {column}"
        for slot in _parse_cell("" if cell is None else str(cell).strip(), where=where):
            if slot in first_cell:
                what = f"{slot.stage}{slot.op.value}{slot.microbatch}"
                raise ScheduleError(f"{where}: {what} stands here and in cell {first_cell[slot]}")
            first_cell[slot] = column
            slots.append(slot)
    return slots


def _parse_cell(cell: str, *, where: str) -> Iterator[Slot]:
    together = _TOGETHER.fullmatch(cell)
    for part in together[1].split(";") if together else [cell]:
        computation = _COMPUTATION.fullmatch(part.strip())
        if computation:
            stage, op, microbatch = computation.groups()
            yield Slot(int(stage), Op(op), int(microbatch))
        elif part and not _MOVEMENT.fullmatch(part):
            raise ScheduleError(f"{where}: {cell!r} is not an action; one looks like 2F0, 1B3, 0I4 or 0W4")


def _rank_of_stage(order: Sequence[Sequence[Slot]], *, name: str) -> list[int]:
    placed: dict[int, int] = {}
    for rank, rank_order in enumerate(order):
        for slot in rank_order:
            if placed.setdefault(slot.stage, rank) != rank:
                raise ScheduleError(
                    f"{name}: stage {slot.stage} is on rank {placed[slot.stage]} and on rank {rank}"
                )
    for stage in range(max(placed) + 1):
        if stage not in placed:
            raise ScheduleError(f"{name}: no rank performs stage {stage}, but there is a stage {max(placed)}")
    return [placed[stage] for stage in range(len(placed))]


def _refuse_gaps(slots: set[Slot], rank_of_stage: Sequence[int], *, microbatches: int, name: str) -> None:
    for stage, rank in enumerate(rank_of_stage):
        for index in range(microbatches):
            halves = [Slot(stage, op, index) for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
            backward = halves if slots.intersection(halves) else [Slot(stage, Op.BACKWARD, index)]
            for slot in (Slot(stage, Op.FORWARD, index), *backward):
                if slot not in slots:
                    what = f"{slot.stage}{slot.op.value}{slot.microbatch}"
                    raise ScheduleError(f"{name}, row {rank + 1} (rank {rank}): {what} is missing")


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


def from_torch(
    class_name: str, *, stages: int, microbatches: int, chunks: int, steps: int, first_step: int = 0
) -> Program:
    """The program of a schedule class of torch.distributed.pipelining. Imports torch.

    Args:
        class_name: torch's name, with or without the prefix `Schedule`: `1F1B`, `ZBVZeroBubble`, ...
        stages: Pipeline ranks.
        microbatches: Micro-batches a step.
        chunks: Stages a rank holds.
        steps: Steps of the segment.
        first_step: Its first step.

    Raises:
        ScheduleError: torch does not have the schedule, or refuses these numbers.
    """
    name = f"torch-{class_name.removeprefix('Schedule')}"
    # torch computes the lists of all ranks on any one of them, from the outlines of its stages; no process
    # group and no module is needed for that.
    outlines = [_stage_outline(chunk * stages, ranks=stages, chunks=chunks) for chunk in range(chunks)]
    try:
        from torch.distributed.pipelining.schedules import (
            PipelineScheduleSingle,
            Schedule1F1B,
            get_schedule_class,
        )

        schedule_class = get_schedule_class(class_name.removeprefix("Schedule"))
        if issubclass(schedule_class, PipelineScheduleSingle):
            if chunks != 1:
                raise ScheduleError(f"{name} has one chunk a rank, and {chunks} are asked for")
            lists = schedule_class(outlines[0], microbatches).pipeline_order
        else:
            lists = schedule_class(outlines, microbatches).pipeline_order
    except ScheduleError:
        raise
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        raise ScheduleError(f"{name}: {error}") from error
    except (AttributeError, ImportError) as error:
        raise ScheduleError(_unknown_torch(name, error)) from error
    if not lists:
        raise ScheduleError(f"{name}: torch does not say what each rank does")
    if schedule_class is Schedule1F1B:
        # The list that torch 2.13 shows for this class leaves out the last rank's first forward; what it
        # performs is the order of ours.
        segment = Segment(ranks=stages, microbatches=microbatches, steps=steps, first_step=first_step)
        return replace(one_f_one_b(segment), schedule=name)
    in_order = [lists[rank] for rank in range(stages)]
    try:
        return from_lists(in_order, name=name, steps=steps, first_step=first_step)
    except ScheduleError as error:
        raise ScheduleError(_unknown_torch(name, error)) from error


def _unknown_torch(name: str, error: Exception) -> str:
    """What another version of torch may cause: its lists are not a public interface."""
    return f"{name}: torch {version('torch')} makes lists that asyncpp cannot read: {error}"


def _stage_outline(stage: int, *, ranks: int, chunks: int) -> Any:
    return SimpleNamespace(
        stage_index=stage,
        num_stages=ranks * chunks,
        group_rank=0,
        group_size=ranks,
        group=None,
        submod=None,
        has_backward=False,
        device="cpu",
        is_first=stage == 0,
        is_last=stage == ranks * chunks - 1,
    )
