"""Timelines of a cell's program: as predicted, and with the times that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncpp_cli.measured_costs import rank_times
from asyncpp_cli.report.cells import Cell
from asyncpp_cli.report.loaded import Run
from asyncpp_cli.settings import SettingError, assign
from schedules import Program, ScheduleError
from schedules.costs import Costs, RankTimes, uniform_costs, with_measured_ranks
from schedules.simulate import Timeline, simulate, steps_to_measure, throughput
from stages.config import RunConfig, ScheduleConfig
from stages.programs import segment_program

STEPS_SHOWN = 4
MOST_BOXES = 1200
"""Of one timeline; a program with more in so many steps is not drawn on a page."""

BACKWARD = 2.0
"""Forwards that a backward is predicted to take, as for the predicted bubble."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A program's timelines, in one unit of time."""

    title: str
    predicted: Timeline
    """Stages of equal cost, a backward twice a forward, updates and messages that take no time."""
    measured: Timeline | None
    """With each rank's own mean time of each action; messages still take no time."""
    predicted_bubble: float | None
    """Of the steady state, in 0..1; so are the next two."""
    measured_times_bubble: float | None
    """What the measured times alone would make."""
    clocked_bubble: float | None
    """What the ranks' clocks said they waited."""
    unit: str
    """`s`, or `forwards` where nothing was measured."""


def pairs(cells: Sequence[Cell]) -> list[Pair]:
    """A pair for each distinct program of the cells, those that are too large to draw left out.

    The times are those of the first completed run that measured some.
    """
    made: dict[object, Pair | None] = {}
    for cell in cells:
        key = _program_key(cell)
        known = made.get(key)
        if key is not None and (known is None or known.measured is None):
            pair = _pair(cell)
            if pair is not None and (known is None or pair.measured is not None):
                made[key] = pair
    return [pair for pair in made.values() if pair is not None]


def _configured(cell: Cell) -> Run | None:
    return next((run for run in cell.runs if run.config is not None), None)


def _program_key(cell: Cell) -> object:
    run = _configured(cell)
    if run is None or run.config is None:
        return None
    sections = ("schedule.", "parallel.stages")
    return tuple(
        (key, repr(value)) for key, value in run.config.items() if key.startswith(sections) and cell.uses(key)
    )


def _pair(cell: Cell) -> Pair | None:
    run = _configured(cell)
    assert run is not None
    assert run.config is not None
    config = RunConfig()
    try:
        assign(config, {key: value for key, value in run.config.items() if value is not None})
        program = segment_program(config, first_step=0, steps=STEPS_SHOWN)
    except (SettingError, ValueError):
        return None
    if sum(map(len, program.actions)) > MOST_BOXES:
        return None
    stages, microbatches = config.parallel.stages, config.schedule.microbatches
    times = _times(cell, program)
    unit = 1.0 if times is None else _mean_work(times) / (1 + BACKWARD)
    measured = _costs(program, times)
    long_enough = segment_program(
        config, first_step=0, steps=steps_to_measure(stages=stages, microbatches=microbatches)
    )
    costs_of_long = _costs(long_enough, times)
    return Pair(
        title=", ".join([f"{cell.schedule}, {stages} stages", *_settings(cell, config)]),
        predicted=simulate(program, uniform_costs(program, forward=unit, backward=unit * BACKWARD)),
        measured=simulate(program, measured) if measured is not None else None,
        predicted_bubble=cell.bubble_predicted,
        measured_times_bubble=(
            throughput(simulate(long_enough, costs_of_long)).bubble if costs_of_long is not None else None
        ),
        clocked_bubble=cell.bubble.mean if cell.bubble is not None else None,
        unit="s" if times is not None else "forwards",
    )


def _settings(cell: Cell, config: RunConfig) -> list[str]:
    """What makes the schedule's program, as far as it is not as always."""
    schedule, plain = config.schedule, ScheduleConfig()
    size = "1 micro-batch" if schedule.microbatches == 1 else f"{schedule.microbatches} micro-batches"
    known = {
        "schedule.microbatches": (f"{size} a step", True),
        "schedule.delay": (f"delay {schedule.delay}", schedule.delay != plain.delay),
        "schedule.chunks": (f"{schedule.chunks} stages a rank", True),
        "schedule.update_interval": (
            f"an update every {schedule.update_interval}",
            schedule.update_interval is not None,
        ),
    }
    return [words for key, (words, is_said) in known.items() if is_said and cell.uses(key)]


def _times(cell: Cell, program: Program) -> RankTimes | None:
    for run in cell.completed:
        try:
            times = rank_times(run.measurement.segments)
        except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError):
            # A row of another form.
            continue
        if times is not None and len(times.forward) == program.num_ranks and _mean_work(times) > 0:
            return times
    return None


def _mean_work(times: RankTimes) -> float:
    """Seconds of a micro-batch's forward and backward at a rank, on average."""
    return sum(map(sum, (times.forward, times.input_half, times.weight_half))) / len(times.forward)


def _costs(program: Program, times: RankTimes | None) -> Costs | None:
    if times is None:
        return None
    try:
        return with_measured_ranks(uniform_costs(program), program, times)
    except ScheduleError:
        return None
