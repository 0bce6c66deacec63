"""Timelines of a cell's program: as predicted, and as the clocks of a run's ranks took it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from asyncpp_cli import runs
from asyncpp_cli.errors import DamagedError
from asyncpp_cli.measured_costs import rank_times
from asyncpp_cli.report.cells import Cell
from asyncpp_cli.report.clocked import Clocked, read_clocked
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

SECONDS = "s"

BACKWARD = 2.0
"""Forwards that a backward is predicted to take, as for the predicted bubble."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A program's timelines, in one unit of time."""

    title: str
    predicted: Timeline
    """Stages of equal cost, a backward twice a forward, updates and messages that take no time. Of the same
    actions as `measured`; without one, of the first steps."""
    measured: Timeline | None
    """The last actions of a run's last segment, as its ranks' clocks say; what a rank waited is left out."""
    shown: str
    """Which steps the timelines show."""
    trouble: str | None
    """What was wrong with the file of a measured one."""
    predicted_bubble: float | None
    """Of the steady state, in 0..1; so are the next two."""
    measured_times_bubble: float | None
    """What the measured times alone would make."""
    clocked_bubble: float | None
    """What the ranks' clocks said they waited."""
    unit: str
    """`SECONDS`, or `forwards` where nothing was measured."""


def pairs(cells: Sequence[Cell]) -> list[Pair]:
    """A pair for each distinct program of the cells, those that are too large to draw left out.

    Of cells with one program, the first counts that has a measured timeline; then the first with times.
    """
    made: dict[object, tuple[_Knows, Pair | None]] = {}
    for cell in cells:
        key = _program_key(cell)
        known = made.get(key)
        if key is None or (known is not None and _promised(cell) <= known[0]):
            continue
        pair = _pair(cell)
        if known is None or _known(pair) > known[0]:
            made[key] = _known(pair), pair
    return [pair for _, pair in made.values() if pair is not None]


class _Knows(IntEnum):
    """What a pair can be made of."""

    PROGRAM = 0
    MEAN_TIMES = 1
    TIMELINE = 2


def _promised(cell: Cell) -> _Knows:
    """The most that the cell may have, at a glance: its files are not read."""
    if not any(
        run.measurement.segments and run.measurement.segments[-1].get("action_seconds")
        for run in cell.completed
    ):
        return _Knows.PROGRAM
    recorded = any(
        run.folder is not None and runs.Run(run.folder).timeline_file.exists() for run in cell.completed
    )
    return _Knows.TIMELINE if recorded else _Knows.MEAN_TIMES


def _known(pair: Pair | None) -> _Knows:
    if pair is None or pair.unit != SECONDS:
        return _Knows.PROGRAM
    return _Knows.TIMELINE if pair.measured is not None else _Knows.MEAN_TIMES


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
    enough = steps_to_measure(stages=stages, microbatches=microbatches, ahead=config.schedule.ahead)
    long_enough = segment_program(config, first_step=0, steps=enough)
    costs_of_long = _costs(long_enough, times)
    clocked, trouble = _clocked(cell, program) if times is not None else (None, None)
    if clocked is not None:
        # Its last steps: what lies before them does not change how these are done.
        steps = min(clocked.steps, enough)
        first_step = clocked.first_step + clocked.steps - steps
        program = segment_program(config, first_step=first_step, steps=steps)
    predicted = simulate(program, uniform_costs(program, forward=unit, backward=unit * BACKWARD))
    return Pair(
        title=", ".join([f"{cell.schedule}, {stages} stages", *_settings(cell, config)]),
        predicted=predicted if clocked is None else clocked.same_of(predicted),
        measured=clocked.as_done(program) if clocked is not None else None,
        shown=_shown(clocked),
        trouble=trouble,
        predicted_bubble=cell.bubble_predicted,
        measured_times_bubble=(
            throughput(simulate(long_enough, costs_of_long)).bubble if costs_of_long is not None else None
        ),
        clocked_bubble=cell.bubble.mean if cell.bubble is not None else None,
        unit=SECONDS if times is not None else "forwards",
    )


def _clocked(cell: Cell, program: Program) -> tuple[Clocked | None, str | None]:
    """The first timeline of a completed run that can be read, and what was wrong with one that cannot."""
    trouble = None
    for run in cell.completed:
        if run.folder is None:
            continue
        try:
            clocked = read_clocked(runs.Run(run.folder))
        except (DamagedError, OSError) as error:
            trouble = str(error)
            continue
        if clocked is not None and len(clocked.actions) == program.num_ranks:
            return clocked, trouble
    return None, trouble


def _shown(clocked: Clocked | None) -> str:
    if clocked is None:
        return f"The first {STEPS_SHOWN} steps; no timeline was measured"
    last = clocked.first_step + clocked.steps
    if clocked.steps_kept >= clocked.steps:
        return f"Steps {clocked.first_step + 1} to {last}, a whole segment"
    kept = "step" if clocked.steps_kept == 1 else f"{clocked.steps_kept:g} steps"
    return f"The last {kept} before the drain after step {last}"


def _settings(cell: Cell, config: RunConfig) -> list[str]:
    """What makes the schedule's program, as far as it is not as always."""
    schedule, plain = config.schedule, ScheduleConfig()
    size = "1 micro-batch" if schedule.microbatches == 1 else f"{schedule.microbatches} micro-batches"
    known = {
        "schedule.microbatches": (f"{size} a step", True),
        "schedule.delay": (f"delay {schedule.delay}", schedule.delay != plain.delay),
        "schedule.ahead": (f"{schedule.ahead} ahead for each stage", schedule.ahead != plain.ahead),
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
