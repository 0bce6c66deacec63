"""Predicted and measured timelines of the cells' programs, as SVG with a tooltip for each action."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from html import escape

from asyncpp_cli.base.errors import DamagedError
from asyncpp_cli.report.analysis.cells import CellResult
from asyncpp_cli.report.load.measured_timeline import MeasuredTimeline, read_measured_timeline
from asyncpp_cli.report.load.run import Settings, grouped, only
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.settings import SettingError, with_settings
from asyncpp_cli.schedule_tools.programs import rank_times
from schedules import Program, is_custom
from schedules.actions import Action, Op
from schedules.costs import RankTimes, uniform_costs, with_measured_ranks
from schedules.simulate import Timeline, simulate
from schedules.step_time import step_graph_of
from stages.config.run_config import RunConfig, ScheduleConfig
from stages.config.segments import is_sharded
from stages.resolve.facts import Resolved, facts

STEPS_SHOWN = 4
MOST_BOXES = 1200
"""Programs with more actions in `STEPS_SHOWN` steps are not drawn."""

SECONDS = "s"

BACKWARD = 2.0
"""Predicted duration of a backward, in forwards, as for the predicted bubble."""


@dataclass(frozen=True, kw_only=True)
class TimelinePair:
    """A program's timelines, in one unit of time."""

    title: str
    predicted: Timeline
    """With equal stages, a backward twice as long as a forward, and updates and messages that take no time.
    Of the same actions as `measured`, or else of the first steps."""
    measured: Timeline | None
    """The last actions of a run's last segment, by the ranks' clocks, without the time that a rank waited."""
    steps: str
    """Which steps the timelines show."""
    problem: str | None
    """Why a measured timeline could not be read."""
    predicted_bubble: float | None
    """Share of the steady state in 0..1 that ranks wait; so are the next two."""
    mean_times_bubble: float | None
    """With the mean measured times of the actions."""
    measured_bubble: float | None
    """By the time that ranks waited."""
    waits: str
    """What these shares are called."""
    unit: str
    """`SECONDS`, or `forwards` if nothing was measured."""

    @property
    def source(self) -> _Source:
        """What it is made from."""
        if self.unit != SECONDS:
            return _Source.PROGRAM
        return _Source.TIMELINE if self.measured is not None else _Source.MEAN_TIMES


def timeline_pairs(cells: Sequence[CellResult]) -> list[TimelinePair]:
    """A pair for each distinct program of the cells that is not too large to draw.

    Of cells with the same program, the first with a measured timeline is taken, else the first with times.
    """
    found = []
    for group in grouped([cell for cell in cells if cell.config is not None], _program_key):
        best: TimelinePair | None = None
        for cell in group:
            if best is not None and _best_source(cell) <= best.source:
                continue
            pair = _pair(cell)
            if pair is not None and (best is None or pair.source > best.source):
                best = pair
        found += [] if best is None else [best]
    return found


class _Source(IntEnum):
    """What a pair is made from."""

    PROGRAM = 0
    MEAN_TIMES = 1
    TIMELINE = 2


def _best_source(cell: CellResult) -> _Source:
    """The best source that the cell may have; its files are not read."""
    if not any(run.segments and run.segments[-1].action_seconds for run in cell.completed):
        return _Source.PROGRAM
    recorded = any(
        run.folder is not None and Run(run.folder).timeline_file.exists() for run in cell.completed
    )
    return _Source.TIMELINE if recorded else _Source.MEAN_TIMES


def _program_key(cell: CellResult) -> Settings:
    settings = only(cell.settings, "schedule.", "parallel.stages")
    return frozenset(each for each in settings if cell.uses(each[0]))


def _pair(cell: CellResult) -> TimelinePair | None:
    assert cell.config is not None
    try:
        given = {key: value for key, value in cell.config.items() if value is not None}
        config = with_settings(RunConfig(), given)
        if is_custom(config.schedule.name):
            # A report runs no code that a folder names.
            return None
        run = facts(config)
        program = run.program(first_step=0, steps=STEPS_SHOWN)
    except (SettingError, ValueError):
        return None
    if sum(map(len, program.actions)) > MOST_BOXES:
        return None
    of_shards, ranks = is_sharded(config), config.parallel.stages
    place = f"{ranks} {'process' if of_shards else 'stage'}{('es' if of_shards else 's') * (ranks != 1)}"
    times = _times(cell, program)
    unit = 1.0 if times is None else _mean_work(times) / (1 + BACKWARD)
    steady = _steady(run, times)
    measured, problem = _measured(cell, program) if times is not None else (None, None)
    if measured is not None:
        # The last steps of the segment do not depend on those before.
        steps = min(measured.steps, STEPS_SHOWN if steady is None else steady[1])
        first_step = measured.first_step + measured.steps - steps
        program = run.program(first_step=first_step, steps=steps)
    predicted = simulate(program, uniform_costs(program, forward=unit, backward=unit * BACKWARD))
    return TimelinePair(
        title=", ".join([cell.schedule, place, *_settings(cell, config)]),
        predicted=predicted if measured is None else measured.part_of(predicted),
        measured=measured.timeline(program) if measured is not None else None,
        steps=_steps(measured),
        problem=problem,
        predicted_bubble=cell.bubble_predicted,
        mean_times_bubble=None if steady is None or of_shards else steady[0],
        measured_bubble=cell.bubble.mean if cell.bubble is not None else None,
        waits="waits for exchanges" if of_shards else "bubble",
        unit=SECONDS if times is not None else "forwards",
    )


def _measured(cell: CellResult, program: Program) -> tuple[MeasuredTimeline | None, str | None]:
    """The first readable timeline of a completed run, and why one before it could not be read."""
    problem = None
    for run in cell.completed:
        if run.folder is None:
            continue
        try:
            timeline = read_measured_timeline(Run(run.folder))
        except (DamagedError, OSError) as error:
            problem = str(error)
            continue
        if timeline is not None and len(timeline.actions) == program.num_ranks:
            return timeline, problem
    return None, problem


def _steps(timeline: MeasuredTimeline | None) -> str:
    if timeline is None:
        return f"The first {STEPS_SHOWN} steps; no timeline was measured"
    last = timeline.first_step + timeline.steps
    if timeline.steps_kept >= timeline.steps:
        return f"Steps {timeline.first_step + 1} to {last}, a whole segment"
    kept = "step" if timeline.steps_kept == 1 else f"{timeline.steps_kept:g} steps"
    return f"The last {kept} before the drain after step {last}"


def _settings(cell: CellResult, config: RunConfig) -> list[str]:
    """The settings of the schedule that are not the defaults."""
    schedule, default = config.schedule, ScheduleConfig()
    size = "1 micro-batch" if schedule.microbatches == 1 else f"{schedule.microbatches} micro-batches"
    known = {
        "schedule.microbatches": (f"{size} per step", True),
        "schedule.delay": (f"delay {schedule.delay}", schedule.delay != default.delay),
        "schedule.ahead": (f"ahead {schedule.ahead}", schedule.ahead != default.ahead),
        "schedule.split": ("split backwards", schedule.split),
        "schedule.costs": (f"costs {schedule.costs}", schedule.costs is not None),
        "schedule.chunks": (f"{schedule.chunks} stages per rank", True),
        "schedule.update_interval": (
            f"an update every {schedule.update_interval}",
            schedule.update_interval is not None,
        ),
    }
    return [text for key, (text, is_shown) in known.items() if is_shown and cell.uses(key)]


def _times(cell: CellResult, program: Program) -> RankTimes | None:
    for run in cell.completed:
        try:
            times = rank_times(run.segments, program.rank_of_stage)
        except (ArithmeticError, IndexError):
            # A row of another form.
            continue
        if times is not None and len(times.forward) == program.num_ranks and _mean_work(times) > 0:
            return times
    return None


def _mean_work(times: RankTimes) -> float:
    """Mean seconds of a micro-batch's forward and backward on a rank."""
    return sum(map(sum, (times.forward, times.input_half, times.weight_half))) / len(times.forward)


def _steady(run: Resolved, times: RankTimes | None) -> tuple[float, int] | None:
    """The bubble with measured times in the long run, and the steps of a segment that comes to it."""
    if times is None:
        return None
    try:
        graph, program = step_graph_of(lambda steps: run.program(first_step=run.sync_steps, steps=steps))
        costs = with_measured_ranks(uniform_costs(program), program, times)
        return graph.step_time(costs).bubble, program.steps
    except ValueError:
        return None


# As in `schedules.io.picture`: colour encodes the weight version, with a contrast between consecutive ones.
_HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_WIDTH = 960
_ROW = 22
_LABEL = 52
_AXIS = 20
_NARROWEST_LABEL = 6.5
"""Width of a digit."""


def to_svg(pair: TimelinePair) -> str:
    """The timelines of a pair, one below the other, on one time scale."""
    timelines = [("predicted", pair.predicted)]
    if pair.measured is not None:
        timelines.append(("measured", pair.measured))
    length = max(timeline.makespan for _, timeline in timelines) or 1.0
    parts: list[str] = []
    top = 0.0
    for title, timeline in timelines:
        parts.append(f'<text class="g-title" x="0" y="{top + 13:g}">{escape(title)}</text>')
        top += _AXIS
        for rank in range(timeline.program.num_ranks):
            parts += _row(timeline, rank, top=top, scale=(_WIDTH - _LABEL) / length, unit=pair.unit)
            top += _ROW
        top += 6
    end = f"{length:.3g} {pair.unit}"
    parts.append(f'<text class="g-axis" x="{_LABEL}" y="{top + 8:g}">0</text>')
    parts.append(f'<text class="g-axis" x="{_WIDTH}" y="{top + 8:g}" text-anchor="end">{escape(end)}</text>')
    height = top + 14
    label = escape(f"Timelines of {pair.title}", quote=True)
    return (
        f'<svg class="gantt" viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


def _row(timeline: Timeline, rank: int, *, top: float, scale: float, unit: str) -> list[str]:
    actions = timeline.program.actions[rank]
    starts, ends = timeline.starts[rank], timeline.ends[rank]
    width = _WIDTH - _LABEL
    parts = [
        f'<text class="g-rank" x="0" y="{top + _ROW - 7:g}">rank {rank}</text>',
        f'<rect class="g-idle" x="{_LABEL}" y="{top + 1:g}" width="{width}" height="{_ROW - 3}"/>',
    ]
    marks = []
    for action, start, end in zip(actions, starts, ends, strict=True):
        x, size = _LABEL + start * scale, (end - start) * scale
        tooltip = escape(f"{action}: {start:.4g} to {end:.4g} {unit}")
        hue = _HUES[action.version % len(_HUES)]
        if action.op is Op.UPDATE:
            # On top of the boxes, and wide enough to be seen.
            size = max(size, 2.0)
            marks.append(
                f'<rect x="{x:.1f}" y="{top:g}" width="{size:.1f}" height="{_ROW - 1}" fill="{hue}" '
                f'stroke="#000" stroke-width=".7"><title>{tooltip}</title></rect>'
            )
            continue
        parts.append(
            f'<rect x="{x:.1f}" y="{top + 1:g}" width="{max(size - 0.6, 0.2):.1f}" height="{_ROW - 3}" '
            f'fill="{hue}" fill-opacity="{_opacity(action)}"><title>{tooltip}</title></rect>'
        )
        label = str(action.microbatch)
        if size > _NARROWEST_LABEL * len(label) + 2:
            parts.append(
                f'<text class="g-box{_INKS[hue, _opacity(action)]}" x="{x + size / 2:.1f}" '
                f'y="{top + _ROW - 7:g}">{label}</text>'
            )
    return [*parts, *marks]


_GROUNDS = {"g-light": "#f0f1f3", "g-light-in-dark": "#21262d"}
"""The page's `--idle`, light and dark, by the class of a text that is white there and black otherwise."""


_EVEN_LUMINANCE = (1.05 * 0.05) ** 0.5 - 0.05
"""Relative luminance on which black and white have the same contrast, 4.58 (WCAG 2.1)."""


def _luminance(hue: str, opacity: float, ground: str) -> float:
    """Relative luminance of a colour that lies on a ground (WCAG 2.1)."""
    total = 0.0
    for place, weight in ((1, 0.2126), (3, 0.7152), (5, 0.0722)):
        over, under = (int(colour[place : place + 2], 16) / 255 for colour in (hue, ground))
        mixed = opacity * over + (1 - opacity) * under
        total += weight * (mixed / 12.92 if mixed <= 0.04045 else ((mixed + 0.055) / 1.055) ** 2.4)
    return total


_OPACITIES = {Op.FORWARD: 0.4, Op.BACKWARD_WEIGHT: 0.7, Op.HEAD_WEIGHT: 0.7}
"""Forwards are pale, backwards opaque, weight halves of split backwards and of the head in between."""


def _opacity(action: Action) -> float:
    return _OPACITIES.get(action.op, 1.0)


_INKS = {
    (hue, opacity): "".join(
        f" {name}" for name, ground in _GROUNDS.items() if _luminance(hue, opacity, ground) < _EVEN_LUMINANCE
    )
    for hue in _HUES
    for opacity in (1.0, *_OPACITIES.values())
}
"""Classes of the text in a box: on each ground black or white, whichever has the better contrast."""
